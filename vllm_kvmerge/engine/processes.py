"""Lifetime of the processes that vLLM starts for an engine or a server: none outlives its parent."""

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
"""Prefixes of the names of the processes that vLLM starts."""

METRICS_DIR = "PROMETHEUS_MULTIPROC_DIR"
METRICS_PREFIX = "vllm-kvmerge-metrics-"
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


def make_metrics_folder() -> str:
    """Makes a folder for the metric files of this process and those that it starts. Raises OSError."""
    return tempfile.mkdtemp(prefix=f"{METRICS_PREFIX}{os.getpid()}-")
