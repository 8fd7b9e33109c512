"""CPU tensors that pass for a card's: what waits for them, or mixes them with others, is an error."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CARD = torch.device("meta")
"""What they say their device is; none of PyTorch's own are there without a card."""

WAITS = {"item", "tolist", "__bool__", "__int__", "__index__", "__float__", "nonzero", "cpu", "numpy", "unique"}
MAY_MIX = {"copy_", "__get__", "to", "__getitem__", "expand_as", "type_as"}
"""What takes tensors of both kinds; of an index see below."""


class OnCard(torch.Tensor):
    """A tensor of the pretended card."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CARD

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        assert name not in WAITS, f"{name} waits for the card"
        tensors = list(_tensors((args, kwargs or {})))
        if name not in MAY_MIX:
            elsewhere = [t for t in tensors if not isinstance(t, OnCard) and t.dim() > 0]
            assert not elsewhere, f"{name} takes tensors of card and CPU"
        if name == "__getitem__":  # an index of the CPU's would be sent to the card, and that waited for
            assert all(isinstance(t, OnCard) for t in tensors), "a CPU tensor as index"
        return super().__torch_function__(function, types, args, kwargs)


def _tensors(value: Any):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class Pinned(torch.Tensor):
    """A CPU tensor that passes for one in pinned memory, of which there is none without a card."""


class Card(TorchFunctionMode):
    """Makes what is made on, or sent to, ``CARD`` pass for a card's. must_pin: only pinned memory may be sent from."""

    def __init__(self, must_pin: bool = False) -> None:
        super().__init__()
        self.must_pin = must_pin

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "pin_memory":
            return args[0].as_subclass(Pinned)
        if name == "to":
            target = next((x for x in (*args[1:], kwargs.get("device")) if isinstance(x, (torch.device, str))), None)
            if target is not None:
                assert target == CARD or not isinstance(args[0], OnCard), "sending to the CPU waits for the card"
                dtype = next((x for x in (*args[1:], kwargs.get("dtype")) if isinstance(x, torch.dtype)), args[0].dtype)
                if not isinstance(args[0], OnCard):
                    assert kwargs.get("non_blocking"), "sending waits for the card"
                    assert isinstance(args[0], Pinned) or not self.must_pin, "sending may wait for the card"
                return args[0].to(dtype).as_subclass(OnCard if target == CARD else torch.Tensor)
        if kwargs.get("device") is not None and kwargs["device"] == CARD:
            kwargs["device"] = "cpu"
            return function(*args, **kwargs).as_subclass(OnCard)
        return function(*args, **kwargs)
