"""Sizes of prompts in haystack units: the largest that fit in a number of tokens."""

from collections.abc import Callable

from vllm_kvmerge.evaluation.tasks.base import Sample

Draw = Callable[[int, int], Sample]
"""(number of the sample, haystack units) -> a new sample of about that size."""

_REDRAWS = 20


class NoRoomError(ValueError):
    """A prompt does not fit."""


def largest_fitting(fits: Callable[[int], bool], step: int, minimum: int) -> tuple[int, int]:
    """The most haystack units with which a random prompt fits, and the step to shrink by where another one does not.

    The official search starts from ``step`` units. Where those do not fit, it never ends; here the step is halved.

    Raises:
        NoRoomError: not even ``minimum`` units fit.
    """
    step = max(step, minimum)
    while not fits(step):
        if step <= minimum:
            raise NoRoomError("length: leaves no room for the shortest prompt of this task")
        step = max(minimum, step // 2)
    low, high = step, 2 * step
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, step


def draw_fitting(draw: Draw, index: int, units: int, step: int, minimum: int, fits: Callable[[Sample], bool]) -> Sample:
    """A sample of ``units``, or of as many steps fewer as it takes.

    Raises:
        NoRoomError: it never fits.
    """
    for _ in range(_REDRAWS + units // step):
        sample = draw(index, units)
        if fits(sample):
            return sample
        if units - step >= minimum:
            units -= step
    raise NoRoomError("length: leaves no room for the shortest prompt of this task")
