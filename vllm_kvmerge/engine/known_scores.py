"""Scores of contexts that were repeated, which workers keep, so that requests that read the same context share them.

The scheduler decides what is kept, because it alone knows which requests read the same context; workers obey.
"""

from collections import OrderedDict


class KnownScores:
    """The contexts whose scores workers keep, by ``PrefixKeys.of``; those used least recently make room for others.

    max_bytes: of a worker's memory outside the pool; 0: none are kept. Numbers name scores in messages to workers.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Number and bytes, most recently used last."""
        self._forgotten: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._known)

    def has_room(self, num_bytes: int) -> bool:
        """True if scores of so many bytes would be kept."""
        return num_bytes <= self._max_bytes

    def find(self, key: bytes) -> int | None:
        """The number of the scores that are kept; None: none are."""
        if key not in self._known:
            return None
        self._known.move_to_end(key)
        return self._known[key][0]

    def keep(self, key: bytes, num_bytes: int) -> int | None:
        """The number by which workers have to keep scores of so many bytes; None: they are too large to be kept."""
        if not self.has_room(num_bytes):
            return None
        self._drop(key)
        while sum(size for _, size in self._known.values()) + num_bytes > self._max_bytes:
            self._drop(next(iter(self._known)))
        number, self._next = self._next, self._next + 1
        self._known[key] = number, num_bytes
        return number

    def clear(self) -> None:
        for key in list(self._known):
            self._drop(key)

    @property
    def has_forgotten(self) -> bool:
        return bool(self._forgotten)

    def take_forgotten(self) -> list[int]:
        """Numbers of scores that workers need not keep any longer, once each."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _drop(self, key: bytes) -> None:
        if key in self._known:
            self._forgotten.append(self._known.pop(key)[0])
