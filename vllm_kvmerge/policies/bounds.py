"""Bounds on the time and memory of third-party parts."""

import signal
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_kvmerge.policies.errors import OutOfMemory, OutOfTime


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises ``OutOfTime`` inside once ``seconds`` have passed; None: never.

    A signal interrupts Python code and system calls, C++ operators only when they return, and nothing in threads other
    than the process's main one. Code that runs inside must not change anything that outlives it.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    late = OutOfTime("took longer than it may (--max-compaction-seconds)")
    if seconds <= 0.0:
        raise late
    is_over = False

    def end(number: int, frame: FrameType | None) -> None:
        if not is_over:
            raise late

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, end)
    # Repeats, because Python swallows exceptions raised in a destructor.
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:  # somebody else's alarm goes on
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, remaining - (time.monotonic() - started)))


@contextmanager
def memory_limit(num_bytes: int | None) -> Iterator[None]:
    """Raises ``OutOfMemory`` inside once tensors that were made there hold more; None: never."""
    if num_bytes is None:
        yield
        return
    with _Meter(num_bytes):
        yield


class _Meter(TorchDispatchMode):
    """Counts the bytes of tensors that PyTorch's operators return, until they are freed."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._held = most, 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        found = {id_: storage for id_, storage in map(_storage, _tensors(result)) if id_ not in self._known}
        if found:
            given = {id_ for id_, _ in map(_storage, _tensors((args, kwargs)))}
            for id_ in found.keys() - given:  # not those of views, and of what is changed in place
                self._add(id_, found[id_])
        return result

    def _add(self, id_: int, storage: Any) -> None:
        num_bytes = storage.nbytes()

        def free(_: object) -> None:
            self._held -= num_bytes
            del self._known[id_]

        self._known[id_] = weakref.ref(storage, free)
        self._held += num_bytes
        if self._held > self._most:
            message = f"held {self._held / 2**20:.1f} MiB, more than {self._most / 2**20:.1f} MiB"
            raise OutOfMemory(f"{message} (--compaction-workspace-bytes)")


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _storage(tensor: Tensor) -> tuple[int, Any]:
    """The tensor's memory, and a number that no other has while it exists."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage
