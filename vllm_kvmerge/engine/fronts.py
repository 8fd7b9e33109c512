"""Compressed contexts in the prefix cache: fronts that later requests take over instead of computing them.

A front's blocks carry hashes of their own in vLLM's block pool, so that they are found, referenced and evicted as any
cached blocks are. A front whose first block is lost is lost as a whole.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from vllm_kvmerge.engine.messages import HeadCounts
from vllm_kvmerge.engine.prefix_keys import PrefixKeys
from vllm_kvmerge.engine.schedule import Segments


@dataclass(frozen=True)
class HeldWindow:
    """Blocks of one group of layers with a window: all that its layers read after a front. group: its index. first_row:
    place of the first of the ``blocks`` in a request's block table, in which they follow one another."""

    group: int
    first_row: int
    blocks: tuple[KVCacheBlock, ...]

    def rows(self, num_rows: int, null_block: KVCacheBlock) -> list[KVCacheBlock]:
        """The first rows of a block table that has these blocks."""
        return [*[null_block] * self.first_row, *self.blocks][:num_rows]


@dataclass(frozen=True)
class SharedFront:
    """Blocks in the prefix cache that hold the first ``num_tokens`` of some request, compressed.

    Of a context: its front alone. Of a turn: all that a request held when it ended, front and tail. rows: places of the
    ``blocks`` in a request's block table; null blocks lie between. kept_bytes: memory that workers keep for it outside
    the pool. turn: the hash of its last full block, and its policy, if it is a turn's. kept: what its compression came
    to, if that is known. windows: of the other groups of layers, in their order.
    """

    key: BlockHash
    segments: Segments
    num_tokens: int
    rows: tuple[int, ...]
    blocks: tuple[KVCacheBlock, ...]
    kept_bytes: int = 0
    turn: tuple[BlockHash | None, str] | None = None
    kept: HeadCounts | None = None
    windows: tuple[HeldWindow, ...] = ()

    @property
    def all_blocks(self) -> tuple[KVCacheBlock, ...]:
        """Those of all groups of layers."""
        return (*self.blocks, *(block for window in self.windows for block in window.blocks))

    def partial(self, block_size: int) -> tuple[KVCacheBlock, ...]:
        """The block that further tokens are written to, if it is among them."""
        full = self.num_tokens // block_size
        return tuple(block for row, block in zip(self.rows, self.blocks, strict=True) if row >= full)


TURN, PART = "turn", "part"
"""What distinguishes the keys of a turn, and of a part of a longer context, from that of a context with the same tokens
and policy."""


class FrontCache:
    """Fronts in the prefix cache of one block pool, by key.

    max_kept_bytes: bound on what workers keep for all of them outside the pool; beyond it the front that has not been
    used for longest goes.
    """

    def __init__(self, pool: BlockPool, group_id: int, keys: PrefixKeys, max_kept_bytes: int) -> None:
        self._pool, self._group_id, self._keys = pool, group_id, keys
        self._max_kept_bytes = max_kept_bytes
        self._fronts: dict[BlockHash, SharedFront] = {}
        """In the order of their last use."""
        self._of_block: dict[int, dict[BlockHash, BlockHashWithGroupId]] = {}
        """By block: the fronts that it belongs to, and its hash as a part of each."""
        self._turns: dict[str, dict[int, dict[BlockHash, BlockHash | None]]] = {}
        """By policy and number of tokens: keys of turns, and hashes of their last full blocks."""
        self._expected: set[BlockHash] = set()
        self._forgotten: list[BlockHash] = []
        self._pinned: Counter[BlockHash] = Counter()

    def __len__(self) -> int:
        return len(self._fronts)

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._fronts

    @property
    def num_blocks(self) -> int:
        return len(self._of_block)

    def key(self, request: Request, num_tokens: int, *policy: str) -> BlockHash | None:
        """The key of the front that ``policy`` (canonical JSON text) makes of the request's first ``num_tokens``;
        None: there cannot be one."""
        return self._keys.of(request, num_tokens, *policy)

    def turn(self, request: Request, num_tokens: int, policy: str) -> tuple[BlockHash | None, str]:
        """``SharedFront.turn`` of the request's first ``num_tokens``."""
        return self._keys.last_full_block(request, num_tokens), policy

    def find(self, key: BlockHash) -> SharedFront | None:
        """The front of this key, if it is there; it then counts as used."""
        front = self._fronts.pop(key, None)
        if front is not None:
            self._fronts[key] = front
        return front

    def find_turn(self, request: Request, policy: str) -> SharedFront | None:
        """The longest turn that the request's prompt begins with, up to its last token but one."""
        size, turns = self._keys.block_size, self._turns.get(policy, {})
        # A request that waits looks at every step, so prompts are not gone through block by block.
        for num_tokens in sorted((one for one in turns if one < request.num_tokens), reverse=True):
            if num_tokens // size > len(request.block_hashes):
                continue
            if self._keys.last_full_block(request, num_tokens) not in turns[num_tokens].values():
                continue
            key = self.key(request, num_tokens, policy, TURN)
            if key is not None and (front := self.find(key)) is not None:
                return front
        return None

    def add(self, front: SharedFront) -> None:
        """Puts a front's blocks, to which the caller holds references, into the prefix cache, and takes over one
        reference to each. There must be no front of this key."""
        index = count()
        for group_id, blocks in ((self._group_id, front.blocks), *((one.group, one.blocks) for one in front.windows)):
            hashes = [self._keys.of_part(front.key, next(index)) for _ in blocks]
            for block_hash, block in zip(hashes, blocks, strict=True):
                hashed = make_block_hash_with_group_id(block_hash, group_id)
                self._pool._insert_block_hash(hashed, block, num_tokens=front.num_tokens)
                self._of_block.setdefault(block.block_id, {})[front.key] = hashed
            if self._pool.enable_kv_cache_events and blocks:
                self._pool.kv_event_queue.append(self._stored(front, group_id, hashes))
        self._fronts[front.key] = front
        self._expected.discard(front.key)
        self._remember(front.key)
        if front.turn is not None:
            parent, policy = front.turn
            self._turns.setdefault(policy, {}).setdefault(front.num_tokens, {})[front.key] = parent
        # Whoever gets one of them from the pool ends the front.
        self._pool.unpin_blocks(front.all_blocks, lambda block: self.lose([block]))
        while sum(one.kept_bytes for one in self._fronts.values()) > self._max_kept_bytes:
            oldest = (key for key, one in self._fronts.items() if one.kept_bytes and key not in self._pinned)
            if (key := next(oldest, None)) is None:
                break
            self._drop(key)

    def pin(self, front: SharedFront) -> None:
        """Keeps a front that is in the cache there, until ``unpin`` has been called as often."""
        self._pool.touch(front.all_blocks)
        self._pinned[front.key] += 1

    def unpin(self, front: SharedFront) -> None:
        """Lets a front go when its blocks are needed."""
        self._pinned -= Counter([front.key])
        self._pool.free_blocks(reversed(front.all_blocks))

    def _stored(self, front: SharedFront, group_id: int, hashes: list[BlockHash]) -> BlockStored:
        """The event that tells of a front's blocks in a group of layers. They are those of no tokens, so that no plain
        prompt matches."""
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(one) for one in hashes],
            parent_block_hash=maybe_convert_block_hash(front.key),
            token_ids=[],
            block_size=self._keys.block_size,
            lora_id=None,
            medium=self._pool.medium,
            lora_name=None,
            group_idx=group_id,
        )

    def lose(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drops the fronts that any of these blocks belongs to."""
        for block in blocks:
            for key in list(self._of_block.get(block.block_id, ())):
                self._drop(key)

    def expect(self, key: BlockHash) -> None:
        """Notes that workers make a front of this key just now; ``add`` or ``forget`` follows."""
        self._expected.add(key)
        self._remember(key)

    def is_known(self, key: BlockHash) -> bool:
        """Whether a front of this key is there, or is being made."""
        return key in self._fronts or key in self._expected

    def forget(self, key: BlockHash) -> None:
        """Has workers forget a front that did not come to be."""
        self._expected.discard(key)
        self._forgotten.append(key)

    def _remember(self, key: BlockHash) -> None:
        """Takes back that workers shall forget a front, which they are given anew."""
        self._forgotten = [one for one in self._forgotten if one != key]

    @property
    def has_forgotten(self) -> bool:
        return bool(self._forgotten)

    def take_forgotten(self) -> list[BlockHash]:
        """Keys of fronts that are gone since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _drop(self, key: BlockHash) -> None:
        front = self._fronts.pop(key)
        for block in front.all_blocks:
            keys = self._of_block[block.block_id]
            self._unhash(block, keys.pop(key), front.num_tokens)
            if not keys:
                del self._of_block[block.block_id]
                self._pool._reuse_watchers.pop(block.block_id, None)
        if front.turn is not None:
            _, policy = front.turn
            turns = self._turns[policy]
            del turns[front.num_tokens][key]
            if not turns[front.num_tokens]:
                del turns[front.num_tokens]
            if not turns:
                del self._turns[policy]
        self._forgotten.append(key)

    def _unhash(self, block: KVCacheBlock, hashed: BlockHashWithGroupId, num_tokens: int) -> None:
        """Takes one of a block's hashes out of the pool, which itself takes out all of them."""
        if self._pool.cached_block_hash_to_block.pop(hashed, block.block_id) is None:
            return  # the pool has, when it gave the block away
        others = self._pool.cached_block_hashes_by_block.get(block.block_id, set())
        others.discard(hashed)
        if block.block_hash == hashed:
            block.reset_hash()
            if others:
                block.set_block_hash(others.pop(), num_tokens=num_tokens)
        if not others:
            self._pool.cached_block_hashes_by_block.pop(block.block_id, None)
        self._pool._emit_block_removed_events([hashed])
