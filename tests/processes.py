"""What processes that tests start do first: they end with the tests, even where pytest is killed."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def end_with_tests() -> None:
    """For ``preexec_fn``: the system kills the process as soon as the thread that started it has ended."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_tests_on_a_disk(folder: str, size: str) -> None:
    """``end_with_tests``, and the folder is a file system of this size that only the process and its children see.

    Raises:
        OSError: this user may not mount one.
    """
    end_with_tests()
    for failed in (
        lambda: _libc.unshare(CLONE_NEWNS),
        lambda: _libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
        lambda: _libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={size}".encode()),
    ):
        if failed():
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
