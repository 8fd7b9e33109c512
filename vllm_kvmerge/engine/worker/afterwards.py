"""Work that a worker's process does once its answer is on its way, while the engine schedules the next step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_left: list[Callable[[], None]] | None = None


@contextmanager
def leaving_work() -> Iterator[None]:
    """What is done inside may leave work, which is done at the end."""
    global _left
    work: list[Callable[[], None]] = []
    _left = work
    try:
        yield
    finally:
        _left = None
    for task in work:
        task()


def afterwards(task: Callable[[], None]) -> None:
    """Leaves a task; does it at once where none can be left, as in an engine whose worker is in the same process."""
    if _left is None:
        task()
    else:
        _left.append(task)
