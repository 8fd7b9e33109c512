"""Time limit of a policy's work."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vllm_kvmerge.policies.errors import OutOfTime


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
