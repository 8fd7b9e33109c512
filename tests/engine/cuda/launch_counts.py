"""Kernels of ours that a compaction launches on a GPU, and how often it waits, counted without one.

The compaction runs on tensors that pass for a GPU's; Triton's operators record what they launch, while the reference
computes the result.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.engine.cuda.gpu import WAITS, OnGPU, SimulatedGPU
from tests.engine.cuda.test_compactions import LENGTHS, on_gpu
from tests.engine.worker.test_batches import BLOCK_SIZE, BUDGET, Worker
from tests.ops.triton_compiler import launches
from vllm_kvmerge import ops
from vllm_kvmerge.engine.worker.compaction import Compaction, Execution
from vllm_kvmerge.ops import dispatch, reference, triton


@dataclass
class Counts:
    """kernels: by name. waits: by what waits for the GPU. machine_codes: that kernels need, compiled for each."""

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    machine_codes: set[tuple[Any, ...]] = field(default_factory=set)
    is_on: bool = True


class _CountingGPU(SimulatedGPU):
    def __init__(self, counts: Counts) -> None:
        super().__init__(may_wait=True, must_pin=True)
        self.counts = counts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if self.counts.is_on and name in WAITS and args and isinstance(args[0], OnGPU):
            self.counts.waits[name] += 1
        return super().__torch_function__(function, types, args, kwargs)


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts what runs in the block on tensors that pass for a GPU's."""
    counts = Counts()

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            implementation, was_on = getattr(triton, name, None), counts.is_on
            if was_on and implementation is not None:
                with launches() as found:
                    implementation(*args, **kwargs)
                counts.kernels.update(launch.kernel.__name__ for launch in found)
                counts.machine_codes.update(launch.key for launch in found)
            counts.is_on = was_on and implementation is None
            try:
                result = getattr(reference, name)(*args, **kwargs)
                # A kernel's results are contiguous, and need no copy for the next one.
                return result if implementation is None else tree_map_only(Tensor, Tensor.contiguous, result)
            finally:
                counts.is_on = was_on

        return call

    def implementation(name: str, *_: Any) -> tuple[Any, str]:
        return SimpleNamespace(**{name: counted(name)}), ""

    ops.choose(None)  # forgets what was decided on
    with (
        mock.patch.object(dispatch, "_implementation", implementation),
        mock.patch("vllm_kvmerge.ops.triton.plan.device_name", lambda device: "NVIDIA H200"),
        _CountingGPU(counts),
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
        assert set(done.budget_data) == (set(range(len(lengths))) if allocator.reads_attention else set())
        found.append(counts)
    return found


def _with_pages(compaction: Compaction, index: int, before: Execution | None) -> Compaction:
    """As the engine plans it on a GPU where heads have budgets of their own. before: what the last step came to."""
    blocks = compaction.plan.blocks[: -(-BUDGET // BLOCK_SIZE)]
    plan = replace(compaction.plan, blocks=blocks, share_blocks=len(blocks))
    if before is None:
        return replace(compaction, plan=plan, has_pages=True)
    own = {"pages": before.pages[index], "budget_data": before.budget_data.get(index), "settles_shares": False}
    return replace(compaction, plan=plan, has_pages=True, **own)
