"""Errors of a policy's parts, and their attribution to a part."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_kvmerge.policies.base import Part

KINDS = ("tracker", "allocator", "selector", "merger")


class PartError(RuntimeError):
    """A part of a policy raised, returned something that cannot be used, or took too much time or memory.

    part: its kind and registered name, such as ``merger:zip``. is_last: it has exceeded its bounds twice, and is not
    used again.
    """

    is_last = False

    def __init__(self, part: str, message: str) -> None:
        super().__init__(f"{part.replace(':', ' ')}: {message}")
        self.part = part


class PartTimeout(PartError):
    """A part ran out of time."""


class PartTooLarge(PartError):
    """A part held more memory than it may."""


class OutOfTime(BaseException):
    """Raised inside a part whose time is over; no ``Exception``, so that a part that catches those cannot go on."""


class OutOfMemory(BaseException):
    """Raised inside a part that holds too much, likewise."""


_EXCEEDED: dict[type[BaseException], type[PartError]] = {OutOfTime: PartTimeout, OutOfMemory: PartTooLarge}


def label(part: "Part") -> str:
    """The part's kind and registered name."""
    kinds = (base.__name__.lower() for base in type(part).__mro__)
    return f"{next((kind for kind in kinds if kind in KINDS), 'part')}:{part.name}"


class blamed_on:  # noqa: N801
    """Context manager that turns exceptions raised inside into a ``PartError`` that names the part."""

    def __init__(self, part: "Part") -> None:
        self._part = part

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OutOfTime | OutOfMemory):
            raise _EXCEEDED[type(error)](label(self._part), str(error)) from None
        if isinstance(error, Exception) and not isinstance(error, PartError):
            raise PartError(label(self._part), describe(error)) from error


def as_part_error(error: BaseException) -> PartError:
    """The error as a ``PartError``, of the composition if no part is to blame."""
    if isinstance(error, PartError):
        return error
    return _EXCEEDED.get(type(error), PartError)("policy:composition", describe(error))


def describe(error: BaseException) -> str:
    """The exception's type and message, in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].removesuffix(": ")
