"""Metric files that never end a process.

With ``PROMETHEUS_MULTIPROC_DIR``, prometheus_client writes each value through a memory map of a sparse file. A full
disk then raises no exception but SIGBUS, which kills the process silently; a missing or read-only folder raises OSError
wherever a metric is first used.
"""

import glob
import json
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from prometheus_client import Gauge, multiprocess
from prometheus_client.mmap_dict import MmapedDict

logger = logging.getLogger(__name__)

INITIAL_BYTES = 1 << 16
"""Size of a new file, as in prometheus_client."""

RETRY_SECONDS = 10.0
"""Time to wait before trying again to write to a file that could not grow."""

ENTRY_BYTES = 64
"""Bound on the size of an entry without its key: length, padding, value, timestamp."""

DAMAGE = (OSError, RuntimeError, ValueError, IndexError, struct.error)
"""Exceptions from reading or writing a file that is truncated, corrupt, or refused by the system."""


class MetricFile(MmapedDict):
    """prometheus_client's file of values, with disk space reserved before it is written to.

    Values for which the file has no room stay in memory, where this process's own ``/metrics`` finds them, and move to
    the file when it can grow again. Like its base class, it is not thread safe: prometheus_client holds a lock.
    """

    opened: ClassVar[dict[str, "MetricFile"]] = {}
    """This process's files by name."""

    write_errors: ClassVar[Gauge | None] = None

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        self._fname = filename
        self._f: Any = None
        self._m: Any = None
        self._capacity = self._used = 0
        self._positions: dict[str, int] = {}
        self._kept: dict[str, tuple[float, float]] = {}
        self._retry_at = 0.0
        if read_mode:
            super().__init__(filename, read_mode)
            return
        self.opened[filename] = self

    def read_value(self, key: str) -> tuple[float, float]:
        """Returns (value, timestamp), zeros for a new key."""
        return super().read_value(key) if self._in_file(key) else self._kept[key]

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        if self._in_file(key):
            super().write_value(key, value, timestamp)
        else:
            self._kept[key] = value, timestamp

    def _in_file(self, key: str) -> bool:
        """True if this key's value is in the file; adds it if there is room."""
        if key in self._positions:
            return True
        num_kept = len(self._kept)
        if time.monotonic() >= self._retry_at:
            try:
                if self._f is None:
                    self._open()
                if key not in self._positions:  # an existing file may have it
                    self._init_value(key)
                for name, kept in list(self._kept.items()):
                    super().write_value(name, *kept)
                    del self._kept[name]
            except DAMAGE as error:
                self._retry_at = time.monotonic() + RETRY_SECONDS
                _warn(f"{self._fname} cannot be written ({error}): its new values are kept in memory")
        is_in_file = key in self._positions
        if not is_in_file:
            self._kept.setdefault(key, (0.0, 0.0))
        if len(self._kept) != num_kept:
            self._report()
        return is_in_file

    def _init_value(self, key: str) -> None:
        need = self._used + len(key.encode()) + ENTRY_BYTES
        if need > self._capacity:
            capacity = self._capacity
            while capacity < need:
                capacity *= 2
            os.posix_fallocate(self._f.fileno(), 0, capacity)
            self._m = mmap.mmap(self._f.fileno(), capacity)
            self._capacity = capacity
        super()._init_value(key)

    def _open(self) -> None:
        """Opens the file and reserves its space; removes a new file again if there is no space."""
        descriptor = os.open(self._fname, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            try:
                os.posix_fallocate(descriptor, 0, size or INITIAL_BYTES)
            except OSError:
                if size == 0:
                    os.unlink(self._fname)
                raise
        finally:
            os.close(descriptor)
        try:
            super().__init__(self._fname)
        except DAMAGE:
            if self._f is not None:
                self._f.close()
            self._f = self._m = None
            self._positions = {}
            raise

    def _report(self) -> None:
        """Sets the gauge to the number of values that are in no file, without the lock of its own methods."""
        if self.write_errors is None:
            return
        file, key = self.write_errors._value._file, self.write_errors._value._key
        missing = sum(len(one._kept) for one in self.opened.values())
        if key in file._positions:
            MmapedDict.write_value(file, key, float(missing), 0.0)
        else:
            file._kept[key] = float(missing), 0.0

    def close(self) -> None:
        if self.opened.get(self._fname) is self:
            del self.opened[self._fname]
        super().close()

    @staticmethod
    def read_all_values_from_file(filename: str) -> Iterator[tuple[str, float, float, int]]:
        """Yields (key, value, timestamp, position) of a file's values, up to where it is damaged.

        This process's own files are read even if they have been deleted, values in memory included.
        """
        own = MetricFile.opened.get(filename)
        try:
            if own is None or own._f is not None:
                path = filename if own is None else f"/proc/self/fd/{own._f.fileno()}"
                for entry in MmapedDict.read_all_values_from_file(path):
                    json.loads(entry[0])
                    yield entry
        except FileNotFoundError:
            pass  # its process has ended
        except DAMAGE as error:
            _warn(f"{filename} cannot be read ({error}): values are missing on /metrics")
        if own is not None:
            for key, (value, timestamp) in list(own._kept.items()):
                yield key, value, timestamp, 0


class MetricFiles(multiprocess.MultiProcessCollector):
    """prometheus_client's collector of all processes' files, with this process's own if the folder is gone."""

    def __init__(self, registry: Any, path: str | None = None) -> None:
        self._path = path or os.environ["PROMETHEUS_MULTIPROC_DIR"]
        if registry:
            registry.register(self)

    def collect(self) -> Any:
        if not os.path.isdir(self._path):
            _warn(f"{self._path} is gone: /metrics shows this process's own values alone")
        names = {*glob.glob(os.path.join(glob.escape(self._path), "*.db")), *MetricFile.opened}
        return self.merge(sorted(names), accumulate=True)


_warned = False


def _warn(message: str) -> None:
    """Logs one warning per process: later ones would have the same cause, and the gauge counts the values."""
    global _warned
    if not _warned:
        _warned = True
        logger.warning("metrics: %s", message)
