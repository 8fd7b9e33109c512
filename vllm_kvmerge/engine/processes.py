"""Lifetime of the processes that vLLM starts for an engine or a server: none outlives its parent."""

import logging
import multiprocessing
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path

logger = logging.getLogger(__name__)

NAMES = ("EngineCore", "VllmWorker", "ApiServer", "VLLM_DP_Coordinator")
"""Prefixes of the names of the processes that vLLM starts."""

METRICS_DIR = "PROMETHEUS_MULTIPROC_DIR"
METRICS_PREFIX = "vllm-kvmerge-metrics-"
FIRST_ERROR = "first-error.txt"
"""In the folder of the metrics, which a server's processes share."""
POLL_SECONDS = 2.0

_watching: int | None = None
"""Id of the process that watches its parent: this one, or one that it was forked from."""


def end_with_parent() -> None:
    """Ends this process as soon as its parent is gone, however the parent ended.

    Only in processes that vLLM starts, not in a program with an engine inside. Without this, vLLM's engine cores and
    API servers go on without their parent, and so do workers while they load a model.
    """
    global _watching
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(NAMES) or _watching == os.getpid():
        return
    _watching = os.getpid()
    logging.getLogger("vllm").addHandler(_FirstError())
    threading.Thread(target=_end_after, args=(parent.sentinel, parent.pid), name="end-with-parent", daemon=True).start()


def _end_after(sentinel: int, pid: int | None) -> None:
    # Processes forked later inherit the other end of the sentinel and keep it open: a new parent id tells as well.
    started_by = os.getppid()
    while not connection.wait([sentinel], POLL_SECONDS) and os.getppid() == started_by:
        pass
    logger.error("%s ends: process %s, which started it, is gone", multiprocessing.current_process().name, pid)
    folder = Path(os.environ.get(METRICS_DIR, ""))
    if folder.name.startswith(f"{METRICS_PREFIX}{pid}-"):  # made by the parent, which could not remove it
        shutil.rmtree(folder, ignore_errors=True)
    # An orderly shutdown would serve nobody, and the main thread may be busy in an operator. multiprocessing's resource
    # tracker frees shared memory once the last of these processes is gone.
    os._exit(1)


class _FirstError(logging.Handler):
    """Leaves the first exception that any process of a server logs where ``first_error`` finds it: of a process that
    cannot start, vLLM tells its parent no reason."""

    def emit(self, record: logging.LogRecord) -> None:
        folder, error = os.environ.get(METRICS_DIR), record.exc_info[1] if record.exc_info else None
        if folder and error is not None:
            with suppress(OSError), open(Path(folder, FIRST_ERROR), "x") as file:
                file.write(" ".join(str(error).split()) or type(error).__name__)


def first_error() -> str | None:
    """What the process logged that was the first to log an exception; None: none did."""
    try:
        return Path(os.environ.get(METRICS_DIR, ""), FIRST_ERROR).read_text() or None
    except OSError:
        return None


def make_metrics_folder() -> str:
    """Makes a folder for the metric files of this process and those that it starts. Raises OSError."""
    return tempfile.mkdtemp(prefix=f"{METRICS_PREFIX}{os.getpid()}-")
