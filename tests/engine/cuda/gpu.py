"""CPU tensors that pass for a GPU's: what waits for them, or mixes them with others, is an error."""

from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from vllm_kvmerge.engine.worker.arriving import Arriving

GPU = torch.device("meta")
"""What they say their device is; none of PyTorch's own are there without a GPU."""

WAITS = {"item", "tolist", "__bool__", "__int__", "__index__", "__float__", "nonzero", "cpu", "numpy", "unique"}
MAY_MIX = {"copy_", "__get__", "to", "__getitem__", "expand_as", "type_as"}
"""What takes tensors of both kinds; of an index see below."""


class OnGPU(torch.Tensor):
    """A tensor of the pretended GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        tensors = list(_tensors((args, kwargs or {})))
        if name not in MAY_MIX:
            elsewhere = [t for t in tensors if not isinstance(t, OnGPU) and t.dim() > 0]
            assert not elsewhere, f"{name} takes tensors of GPU and CPU"
        if name == "__getitem__":  # an index of the CPU's would be sent to the GPU, and that waited for
            assert all(isinstance(t, OnGPU) for t in tensors), "a CPU tensor as index"
        return super().__torch_function__(function, types, args, kwargs)


def _tensors(value: Any):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _arrived(numbers: torch.Tensor) -> torch.Tensor:
    """What is on its way to pinned memory, without the events that a GPU tells its coming by."""
    return torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu").copy_(numbers.as_subclass(torch.Tensor))


class Pinned(torch.Tensor):
    """A CPU tensor that passes for one in pinned memory, of which there is none without a GPU."""


class SimulatedGPU(TorchFunctionMode):
    """Makes what is made on, or sent to, ``GPU`` pass for a GPU's.

    may_wait: for the GPU, which is otherwise an error. must_pin: only pinned memory may be sent from.
    """

    def __init__(self, may_wait: bool = False, must_pin: bool = False) -> None:
        super().__init__()
        self.may_wait, self.must_pin = may_wait, must_pin

    def __enter__(self):
        # An engine on the CPU puts a function of its own there, for good, that this mode would not see.
        self._pin_memory = torch.Tensor.pin_memory
        torch.Tensor.pin_memory = lambda tensor, *_: tensor.as_subclass(Pinned)
        self._arriving = mock.patch.object(Arriving, "of", lambda numbers: Arriving(_arrived(numbers)))
        self._arriving.start()
        return super().__enter__()

    def __exit__(self, *raised):
        torch.Tensor.pin_memory = self._pin_memory
        self._arriving.stop()
        return super().__exit__(*raised)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        of_gpu = bool(args) and isinstance(args[0], OnGPU)
        if of_gpu:
            assert self.may_wait or name not in WAITS, f"{name} waits for the GPU"
            assert name != "numpy", "NumPy has no tensors of a GPU"
        if name == "cpu" and of_gpu:
            return args[0].as_subclass(torch.Tensor).clone()
        if name == "to":
            target = next((x for x in (*args[1:], kwargs.get("device")) if isinstance(x, (torch.device, str))), None)
            if target is not None:
                return self._sent(args[0], torch.device(target), args, kwargs)
        if name == "copy_" and of_gpu and not isinstance(args[1], OnGPU):
            is_async = kwargs.get("non_blocking") and isinstance(args[1], Pinned)
            assert self.may_wait or is_async, "copying waits for the GPU"
            args = args[0], args[1].as_subclass(torch.Tensor), *args[2:]
        if kwargs.get("device") is not None and torch.device(kwargs["device"]) == GPU:
            kwargs["device"] = "cpu"
            return function(*args, **kwargs).as_subclass(OnGPU)
        return function(*args, **kwargs)

    def _sent(self, tensor: torch.Tensor, target: torch.device, args: tuple, kwargs: dict) -> torch.Tensor:
        dtype = next((x for x in (*args[1:], kwargs.get("dtype")) if isinstance(x, torch.dtype)), tensor.dtype)
        if target != GPU:
            assert self.may_wait or not isinstance(tensor, OnGPU), "sending to the CPU waits for the GPU"
        elif not isinstance(tensor, OnGPU):
            assert self.may_wait or kwargs.get("non_blocking"), "sending waits for the GPU"
            assert isinstance(tensor, Pinned) or not self.must_pin, "sending may wait for the GPU"
        moves = (target == GPU) != isinstance(tensor, OnGPU)
        there = tensor.as_subclass(torch.Tensor).to(dtype, copy=moves or kwargs.get("copy", False))
        return there.as_subclass(OnGPU) if target == GPU else there
