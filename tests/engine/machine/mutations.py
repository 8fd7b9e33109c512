"""Faults to plant in the product, one at a time, each of which the machine must find."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from vllm.v1.core.block_pool import BlockPool

from vllm_kvmerge.engine.blocks import MergeableAttentionManager
from vllm_kvmerge.engine.fronts import FrontCache
from vllm_kvmerge.engine.plan import CompressionReport, WindowMove
from vllm_kvmerge.engine.schedule import RequestCompression
from vllm_kvmerge.engine.scheduler import CompressionSchedulerMixin
from vllm_kvmerge.engine.sharing import ContextSharing

Manager = MergeableAttentionManager
Around = Callable[..., Any]
"""Called with the method that it takes the place of, and its arguments."""

MUTATIONS: dict[str, tuple[type, str, Around, str]] = {}
"""By what is wrong: the method that is replaced, by what, and what the machine says of it."""


def mutation(fault: str, owner: type, name: str, found: str) -> Callable[[Around], Around]:
    """found: pattern of the messages that the fault may be found by."""

    def add(around: Around) -> Around:
        MUTATIONS[fault] = owner, name, around, found
        return around

    return add


@contextmanager
def planted(fault: str) -> Iterator[None]:
    owner, name, around, _ = MUTATIONS[fault]
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    with patch.object(owner, name, method):
        yield


@mutation("a retired block is reused in the same step", Manager, "retire_read", "meet in blocks|not its own")
def _(original: Any, self: Any, request_id: str) -> None:
    self.block_pool.free_blocks(reversed(self._still_read.pop(request_id)))


@mutation("blocks are released when a compression begins that takes several steps", Manager, "relocate", "not its own")
def _(original: Any, self: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
    relocation = original(self, request_id, *args, **kwargs)
    if relocation is not None:
        self._retired += self._still_read[request_id]
        self._still_read[request_id] = []
    return relocation


@mutation("a hash is kept after a merge", BlockPool, "evict_blocks", "what its hash says")
def _(original: Any, self: Any, block_ids: set[int]) -> None:
    pass


@mutation("the tail begins a token too early", Manager, "relocate", "the scheduler takes|reads .* entries")
def _(original: Any, self: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
    relocation = original(self, request_id, *args, **kwargs)
    if relocation is not None:
        segments = self.segments[request_id]
        self.segments[request_id] = replace(segments, tail=segments.tail - 1)
    return relocation


@mutation("a shared front is written to", Manager, "offer", "of a front")
def _(original: Any, self: Any, request_id: str, front: Any, writes: bool = False, hit: int = 0) -> Any:
    return original(self, request_id, front, False, hit)


@mutation("a copy is left out", ContextSharing, "adoptions", "not its own")
def _(original: Any, self: Any, requests: Any) -> Any:
    adoptions = original(self, requests)
    return {name: replace(one, sources=one.sources[:-1], blocks=one.blocks[:-1]) for name, one in adoptions.items()}


@mutation("a front is offered before it has been computed", CompressionSchedulerMixin, "_complete", "of a front|before")
def _(original: Any, self: Any, spread: Any, step: Any) -> None:
    original(self, spread, step)
    if spread.plan.key is not None:
        share, self._sharing.share = self._sharing.share, lambda plan, report: None
        share(spread.plan, CompressionReport())


@mutation("a front is shared whose compression failed", ContextSharing, "share", "has failed")
def _(original: Any, self: Any, plan: Any, report: Any) -> None:
    original(self, plan, replace(report, failures={}))


@mutation("a front outlasts its blocks", FrontCache, "lose", "front|not its own|hash")
def _(original: Any, self: Any, blocks: Any) -> None:
    pass


@mutation("prefix-cache hits are too long", RequestCompression, "longest_prefix", "lacks")
def _(original: Any, self: Any, compression: int) -> int:
    return compression - 1


@mutation("the queries of a window are scored too late", RequestCompression, "window_start", "lacks")
def _(original: Any, self: Any, compression: int) -> int | None:
    start = original(self, compression)
    return None if start is None else start + 1


@mutation("references are leaked at an abort", Manager, "pop_blocks_for_free", "references")
def _(original: Any, self: Any, request_id: str) -> Any:
    self._still_read.pop(request_id, None)
    return original(self, request_id)


@mutation("a preempted request keeps its old front", Manager, "pop_blocks_for_free", "")
def _(original: Any, self: Any, request_id: str) -> Any:
    segments = self.segments.get(request_id)
    blocks = original(self, request_id)
    if segments is not None:
        self.segments[request_id] = segments
    return blocks


@mutation("blocks of compressed requests are not zeroed", Manager, "_note_unclean", "behind")
def _(original: Any, self: Any, blocks: Any) -> None:
    pass


@mutation("approximations are hashed", Manager, "hashes_blocks_of", "hash")
def _(original: Any, self: Any, request: Any) -> bool:
    return True


@mutation("a front that turns out smaller gives back a block too many", Manager, "shrink_front", "")
def _(original: Any, self: Any, request_id: str, report: Any) -> int:
    return original(self, request_id, replace(report, num_blocks=report.num_blocks - 1))


@mutation("a compression under way is not dropped with its request", CompressionSchedulerMixin, "_drop_spread", "")
def _(original: Any, self: Any, request: Any) -> bool:
    return False


@mutation("a window that a hit ends within is not copied", CompressionSchedulerMixin, "schedule", "its window")
def _(original: Any, self: Any, *args: Any) -> Any:
    output = original(self, *args)
    output.kv_cache_block_copies = None
    return output


@mutation("keys are turned in windows that others read", Manager, "_own_window", "shared|hash")
def _(original: Any, self: Any, request_id: str, manager: Any, first: int, num_rows: int, given_up: Any) -> WindowMove:
    ids = [block.block_id for block in manager.req_to_blocks[request_id][first : first + num_rows]]
    return WindowMove(manager.kv_cache_group_id, first, ids, ids)


@mutation(
    "workers hear of nothing in steps of plain requests", CompressionSchedulerMixin, "_is_plain", "front|scores|knows"
)
def _(original: Any, self: Any) -> bool:
    return not (self._compressions or self._repeating)
