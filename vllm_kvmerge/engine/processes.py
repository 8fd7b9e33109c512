"""Processes that vLLM starts for an engine or a server: none outlives the one that started it."""

import logging
import multiprocessing
import os
import shutil
import tempfile
import threading
from multiprocessing import connection
from pathlib import Path

logger = logging.getLogger(__name__)

NAMES = ("EngineCore", "VllmWorker", "ApiServer", "VLLM_DP_Coordinator")
"""Beginnings of the names of the processes that vLLM starts."""

METRICS_DIR = "PROMETHEUS_MULTIPROC_DIR"
METRICS_PREFIX = "vllm-kvmerge-metrics-"
POLL_SECONDS = 2.0

_watching: int | None = None
"""The process that watches its parent: this one, or one that it was forked from."""


def end_with_parent() -> None:
    """Ends this process as soon as the one that started it is gone, in whatever way that ended.

    For processes that vLLM starts for itself. In any other, such as a program with an engine inside, it does nothing.
    vLLM's own engine cores and API servers go on without their parent, and so do workers while they load a model.
    """
    global _watching
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(NAMES) or _watching == os.getpid():
        return
    _watching = os.getpid()
    threading.Thread(target=_end_after, args=(parent.sentinel, parent.pid), name="end-with-parent", daemon=True).start()


def _end_after(sentinel: int, pid: int | None) -> None:
    # A forked process passes the other end of its sentinel on to those forked after it: then its new parent tells.
    started_by = os.getppid()
    while not connection.wait([sentinel], POLL_SECONDS) and os.getppid() == started_by:
        pass
    logger.error("%s ends: process %s, which started it, is gone", multiprocessing.current_process().name, pid)
    _remove_metrics_folder(pid)
    # Nobody is left to hear of an orderly end, and the main thread may be busy in an operator. Shared memory is freed
    # by multiprocessing's resource tracker once the last of these processes is gone.
    os._exit(1)


def make_metrics_folder() -> str:
    """Makes a folder for all processes that this one starts to count in, and returns its name. Raises OSError."""
    return tempfile.mkdtemp(prefix=f"{METRICS_PREFIX}{os.getpid()}-")


def _remove_metrics_folder(pid: int | None) -> None:
    """Removes the folder that process ``pid`` has made and could not remove."""
    folder = Path(os.environ.get(METRICS_DIR, ""))
    if folder.name.startswith(f"{METRICS_PREFIX}{pid}-"):
        shutil.rmtree(folder, ignore_errors=True)
