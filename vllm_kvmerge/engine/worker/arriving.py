"""Numbers copied from a GPU without waiting for it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arriving:
    """Numbers on their way from a GPU; ``done`` None: they are here."""

    numbers: Tensor
    done: torch.cuda.Event | None = None

    @classmethod
    def of(cls, numbers: Tensor) -> "Arriving":
        if numbers.is_cpu:
            return cls(numbers)
        copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copied.copy_(numbers, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(copied, done)

    def __getitem__(self, index: int) -> "Arriving":
        return Arriving(self.numbers[index], self.done)

    @property
    def are_here(self) -> bool:
        return self.done is None or self.done.query()

    def take(self) -> list[Any]:
        """The numbers, waiting for them if need be."""
        if self.done is not None:
            self.done.synchronize()
        return self.numbers.tolist()  # type: ignore[no-any-return]
