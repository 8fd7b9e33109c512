"""Kernels that a compaction launches on a GPU, and how often it waits: ``python -m tests.engine.cuda.launch_counts``.

Counted without a GPU: the compaction runs on tensors that pass for a GPU's. What PyTorch would launch is counted as one
kernel for each of its operations that is not a view or an allocation (some, such as sorts, launch several); what our
operators would, by letting Triton's record what they launch, while the reference computes the result.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.engine.cuda.gpu import GPU, WAITS, OnGPU, SimulatedGPU, _tensors
from tests.engine.cuda.test_compactions import LENGTHS, on_gpu
from tests.engine.worker.test_batches import BLOCK_SIZE, BUDGET, Worker
from tests.ops.triton_compiler import launches
from vllm_kvmerge import ops
from vllm_kvmerge.engine.worker.compactor import Compaction, Execution
from vllm_kvmerge.ops import dispatch, reference, triton
from vllm_kvmerge.policies import PRESETS

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view"}
"""Operations that launch nothing and are not marked as views."""


@dataclass
class Counts:
    """kernels: by name. waits: by what waits for the GPU. machine_codes: that our kernels need, compiled for each."""

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    machine_codes: set[tuple[Any, ...]] = field(default_factory=set)


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts, self.is_on = counts, True
        self.is_inside = False
        """An operation on tensors of the GPU is under way: what it is made of is too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        launches = self.is_on and not function.is_view and name not in FREE
        if launches and (self.is_inside or any(isinstance(one, OnGPU) for one in _tensors((list(args), kwargs or {})))):
            self.counts.kernels[name] += 1
        return function(*args, **(kwargs or {}))


class _CountingGPU(SimulatedGPU):
    def __init__(self, counts: Counts, operations: _Operations) -> None:
        super().__init__(may_wait=True, must_pin=True)
        self.counts, self.operations = counts, operations

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if self.operations.is_on and name in WAITS and args and isinstance(args[0], OnGPU):
            self.counts.waits[name] += 1
        was_inside, tensors = self.operations.is_inside, _tensors((list(args), kwargs or {}))
        self.operations.is_inside = _is_made_there(kwargs) or any(isinstance(one, OnGPU) for one in tensors)
        try:
            return super().__torch_function__(function, types, args, kwargs)
        finally:
            self.operations.is_inside = was_inside

    def _sent(self, tensor, target, args, kwargs):
        if self.operations.is_on and isinstance(tensor, OnGPU) != (target == torch.device("meta")):
            self.counts.kernels["copy between CPU and GPU"] += 1
            self.operations.is_inside = False
        return super()._sent(tensor, target, args, kwargs)


def _is_made_there(kwargs: dict[str, Any] | None) -> bool:
    device = (kwargs or {}).get("device")
    return device is not None and torch.device(device) == GPU


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts what runs in the block on tensors that pass for a GPU's."""
    counts = Counts()
    operations = _Operations(counts)

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            implementation = getattr(triton, name, None)
            was_on = operations.is_on
            if was_on and implementation is not None:
                with launches() as found:
                    implementation(*args, **kwargs)
                counts.kernels.update(launch.kernel.__name__ for launch in found)
                counts.machine_codes.update(launch.key for launch in found)
            operations.is_on = was_on and implementation is None
            try:
                result = getattr(reference, name)(*args, **kwargs)
                # A kernel's results are contiguous, and need no copy for the next one.
                return result if implementation is None else tree_map_only(torch.Tensor, Tensor.contiguous, result)
            finally:
                operations.is_on = was_on

        return call

    def implementation(name: str, *_: Any) -> tuple[Any, str]:
        return SimpleNamespace(**{name: counted(name)}), ""

    ops.choose(None)  # forgets what was decided on
    with (
        mock.patch.object(dispatch, "_implementation", implementation),
        mock.patch("vllm_kvmerge.ops.triton.plan.device_name", lambda device: "NVIDIA H200"),
        operations,
        _CountingGPU(counts, operations),
    ):
        yield counts
    ops.choose(None)


def of_policy(policy: str, lengths: tuple[int, ...] = LENGTHS, **fields: Any) -> list[Counts]:
    """Of a batch's first compaction, at its prompts' end, and of one after an interval."""
    found = []
    with SimulatedGPU(may_wait=True, must_pin=True):
        worker = Worker(policy, lengths, **fields)
        on_gpu(worker, blocks_on_gpu=True)
    allocator, done = worker.config.policy.allocator, None
    is_uneven = worker.capacity > BUDGET
    for step in (worker.first, worker.second):
        if is_uneven:
            step = [_with_pages(one, index, done) for index, one in enumerate(step)]
        with counting() as counts:
            done = worker.compactor.execute(step)
        assert not done.failures, done.failures
        assert set(done.found) == (set(range(len(lengths))) if allocator.reads_attention else set())
        found.append(counts)
    return found


def _with_pages(compaction: Compaction, index: int, before: Execution | None) -> Compaction:
    """As the engine plans it on a GPU where heads have budgets of their own. before: what the last step came to."""
    blocks = compaction.plan.blocks[: -(-BUDGET // BLOCK_SIZE)]
    plan = replace(
        compaction.plan, blocks=blocks, share_blocks=len(blocks), has_pages=True, settles_shares=before is None
    )
    if before is None:
        return replace(compaction, plan=plan)
    return replace(compaction, plan=plan, pages=before.pages[index], found=before.found.get(index))


def main() -> None:
    for policy in sys.argv[1:] or PRESETS:
        first, second = of_policy(policy)
        told = [f"{sum(one.kernels.values())} kernels, {sum(one.waits.values())} waits" for one in (first, second)]
        print(f"{policy:20} {told[0]:28} {told[1]}")
        if len(sys.argv) == 2:
            for one in (first, second):
                print(one.kernels.most_common(60), dict(one.waits))


if __name__ == "__main__":
    main()
