"""The engine's KV blocks: the cache spec with metadata in the page, and the manager of compressed sequences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    replace_as,
)
from vllm.v1.request import Request

from vllm_kvmerge.engine.fronts import FrontCache, HeldWindow, SharedFront
from vllm_kvmerge.engine.internal_requests import InternalRequest
from vllm_kvmerge.engine.messages import FrontReport, MoveWindow
from vllm_kvmerge.engine.schedule import FrontSize, Segments
from vllm_kvmerge.engine.state import Offer, RequestState, RequestStates
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.ops import cell_bytes, latent_cell_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MergeableAttentionSpec(FullAttentionSpec):
    """Full attention whose cells also hold an entry's vote, score, second statistic and position."""

    @classmethod
    def of(cls, spec: AttentionSpec) -> "MergeableAttentionSpec":
        """Widens the cells of a dense spec."""
        return replace_as(spec, cls, state_content_bytes=cell_bytes(spec.head_size, spec.dtype))


class MergeableLatentSpec(MLAAttentionSpec):
    """Multi-head latent attention whose cells also hold that."""

    @classmethod
    def of(cls, spec: AttentionSpec) -> "MergeableLatentSpec":
        """Widens the cells of a spec of latents as the model computes them."""
        return replace_as(spec, cls, state_content_bytes=latent_cell_bytes(spec.head_size, spec.dtype))


MERGEABLE_SPECS = MergeableAttentionSpec, MergeableLatentSpec

WINDOW_SPECS = SlidingWindowSpec, ChunkedLocalAttentionSpec
"""Specs of layers that see the newest tokens alone. They keep vLLM's own managers."""


@dataclass(frozen=True)
class Relocation:
    """Location of a compressed front: ids of its ``blocks``. num_freed: blocks that the pool gains. windows: of the
    other groups of layers, if their keys are turned."""

    blocks: list[int]
    num_freed: int
    windows: list[MoveWindow]


@dataclass(frozen=True)
class Takeover:
    """A request's begin with a front: ids of blocks that are copied before the step, and of the request's own."""

    front: SharedFront
    sources: list[int]
    blocks: list[int]


class MergeableAttentionManager(FullAttentionManager):
    """Full-attention manager whose requests may own a compressed front, a hole and a tail.

    Blocks that a compression makes superfluous leave the request's block table at once. They are *retired* in the step
    whose compaction reads them last, and return to the pool with ``release_retired``, after the last relocation of that
    step. So their next owner writes to them in a later one. If the request is freed before, they are freed with it.

    Blocks that a compressed request wrote may hold any value, NaN included. vLLM's CPU operators read slots past the
    end of a sequence, where a NaN would spread, so such blocks are zeroed before an uncompressed request gets them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.states = RequestStates()
        """Of compressed requests: the scheduler's."""
        self.fronts: FrontCache | None = None
        """Compressed contexts in the prefix cache; None: there are none."""
        self.windows: Sequence[SingleTypeKVCacheManager] = ()
        """vLLM's managers of the other groups of layers, which have windows."""
        self._retired: list[KVCacheBlock] = []
        self._unclean: set[int] = set()
        self._taken_over: dict[str, Takeover] = {}
        self._superseded: dict[int, BlockHashWithGroupId] = {}
        """Hashes, by block, of what was computed for a context that is shared compressed, and not found since."""

    def offer(self, state: RequestState, front: SharedFront, writes: bool, hit: int) -> tuple[list[KVCacheBlock], ...]:
        """Offers a front to a request that waits. Returns the blocks of its first ``hit`` tokens as if found in the
        prefix cache, for each group of layers: up to the last full one; of layers with a window up to the last one, of
        which vLLM makes a copy if the hit ends in it. writes: the request writes to the front; in any case to the block
        of its next token."""
        groups, passed = {self.kv_cache_group_id: self._row(front, hit // self.block_size)}, list[KVCacheBlock]()
        for manager, window in zip(self.windows, front.windows, strict=True):
            groups[window.group] = rows = window.rows(-(-hit // manager.block_size), self._null_block)
            first = max(0, self._num_passed(manager, hit) - window.first_row)
            passed += [*window.blocks[:first], *window.blocks[max(0, len(rows) - window.first_row) :]]
        copied = front.blocks if writes else front.partial(self.block_size)
        state.offer = Offer(front, copied, tuple(passed))
        return tuple(groups[group] for group in sorted(groups))

    def num_to_begin(self, state: RequestState, rows: Sequence[list[KVCacheBlock]]) -> int:
        """Free blocks that a request needs to begin with the front that it is offered. rows: what ``offer`` has
        returned."""
        offer, num_tokens, request_id = state.offer, state.request.num_tokens, state.request.request_id
        assert offer is not None
        front, hit = offer.front, min(offer.front.num_tokens, num_tokens - 1)
        num_rows = -(-num_tokens // self.block_size) - hit // self.block_size
        needed = self._get_num_evictable_blocks((*front.blocks, *offer.passed)) + len(offer.copied)
        needed += num_rows - len(front.partial(self.block_size))
        for one in self.windows:
            needed += one.get_num_blocks_to_allocate(
                request_id, num_tokens, rows[one.kv_cache_group_id], hit, hit, num_tokens, apply_admission_cap=True
            )
        return needed

    def _num_passed(self, manager: SingleTypeKVCacheManager, num_tokens: int) -> int:
        """First rows of a block table that no query after ``num_tokens`` reads."""
        return manager.get_num_skipped_tokens(num_tokens) // manager.block_size

    def num_window_blocks(self, num_tokens: int) -> int:
        """Blocks that layers with a window need after the first ``num_tokens`` of a request."""
        return sum(-(-num_tokens // one.block_size) - self._num_passed(one, num_tokens - 1) for one in self.windows)

    def hold_windows(self, request_id: str, num_tokens: int) -> tuple[HeldWindow, ...] | None:
        """What layers with a window need after the request's first ``num_tokens``, with a reference to each block;
        None: some of it is gone."""
        held = list[HeldWindow]()
        for one in self.windows:
            num_rows = -(-num_tokens // one.block_size)
            first = self._num_passed(one, num_tokens - 1)  # whose output, too, a request may have to compute
            blocks = tuple(one.req_to_blocks.get(request_id, ())[first:num_rows])
            if len(blocks) < num_rows - first or any(block.is_null for block in blocks):
                return None
            held.append(HeldWindow(one.kv_cache_group_id, first, blocks))
        for window in held:
            self.block_pool.touch(window.blocks)
        return tuple(held)

    def _row(self, front: SharedFront, num_blocks: int) -> list[KVCacheBlock]:
        """The first blocks of the table of a request that begins with a front."""
        row = [self._null_block] * num_blocks
        for index, block in zip(front.rows, front.blocks, strict=True):
            if index < num_blocks:
                row[index] = block
        return row

    def take_takeovers(self) -> dict[str, Takeover]:
        """Requests that have begun with a front since the last call."""
        taken, self._taken_over = self._taken_over, {}
        return taken

    def retire(self, request_id: str, index: int) -> None:
        """Retires a block in the request's hole that this step writes to, and none reads."""
        row = self.req_to_blocks[request_id]
        self._note_unclean([row[index]])
        self._retired.append(row[index])
        row[index] = self._null_block

    def copy_of(self, num_blocks: int) -> list[KVCacheBlock] | None:
        """Blocks for a copy of a front; None: there are hardly any free, which running requests need."""
        if 2 * num_blocks > self.block_pool.get_num_free_blocks():
            return None
        return self.block_pool.get_new_blocks(num_blocks)

    def discard(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Returns blocks to the pool that a compressed request, or a front, was copied to."""
        self._note_unclean(list(blocks))
        self.block_pool.free_blocks(blocks)

    def share(self, front: SharedFront) -> None:
        """Puts a front, to whose blocks the caller holds references, into the prefix cache, which takes them over."""
        assert self.fronts is not None
        # Its contents are not what a model computed.
        self._unclean |= {block.block_id for block in front.blocks}
        self.fronts.add(front)

    def computed_blocks(self, state: RequestState) -> list[KVCacheBlock]:
        """The request's blocks without those that it found in the prefix cache."""
        return self.req_to_blocks[state.request.request_id][state.num_hit_blocks :]

    def supersede(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Notes blocks in the prefix cache that a front takes the place of: those who ask for its context find it."""
        # A prefix's tail is evicted before its head.
        self._superseded |= {
            block.block_id: block.block_hash for block in reversed(blocks) if block.block_hash is not None
        }

    def evict_superseded_first(self, num_blocks: int) -> None:
        """Makes superseded blocks the first to be evicted, if the next ``num_blocks`` might evict any.

        They are several times a front's size: in the order of their use they would evict the fronts themselves.
        """
        queue = self.block_pool.free_block_queue
        if not self._superseded or all(
            block.block_hash is None for block in islice(queue.iter_blocks_after(None), num_blocks)
        ):
            return
        superseded = []
        for block_id, block_hash in self._superseded.items():
            block = self.block_pool.blocks[block_id]
            if block.ref_cnt == 0 and block.block_hash == block_hash:
                queue.remove(block)
                superseded.append(block)
        queue.prepend_n(superseded)
        self._superseded.clear()

    def offer_unhashed(self, num_blocks: int) -> int:
        """Makes so many free blocks that are not in the prefix cache, or all there are, the next to be given out;
        returns their number."""
        queue = self.block_pool.free_block_queue
        unhashed = [block for block in queue.iter_blocks_after(None) if block.block_hash is None][:num_blocks]
        for block in unhashed:
            queue.remove(block)
        queue.prepend_n(unhashed)
        return len(unhashed)

    def relocate(
        self,
        state: RequestState,
        num_tokens: int,
        new_front: FrontSize,
        num_computed: int | None = None,
        turns_windows: bool = False,
    ) -> Relocation | None:
        """Gives a request its own blocks for a front; all others before slot ``num_tokens`` go with ``retire_read``.

        num_computed: tokens computed so far, if they are more. turns_windows: keys of layers with a window are written
        to as well, so that these blocks, too, must be its own.

        Shared blocks are never written to. In this order it takes unhashed blocks that only this request holds, free
        blocks of the pool, and hashed blocks that only this request holds, which lose their hash. The others go back
        to the pool with theirs. Returns None, and changes nothing, if there are not enough blocks.
        """
        request_id = state.request.request_id
        row = self.req_to_blocks[request_id]
        num_front_blocks = new_front.num_blocks
        num_replaced = max(num_front_blocks, num_tokens // self.block_size)
        held = [block for block in row[:num_replaced] if not block.is_null]
        own = [block for block in held if block.ref_cnt == 1]
        private = [block for block in own if block.block_hash is None][:num_front_blocks]
        windows = self._windows_at(request_id, num_computed or num_tokens) if turns_windows else []
        in_windows = [block for _, _, blocks in windows for block in blocks]
        num_free = self.block_pool.get_num_free_blocks() - sum(block.ref_cnt > 1 for block in in_windows)
        if num_free < 0:
            return None
        num_fresh = min(num_front_blocks - len(private), num_free)
        num_unhashed = num_front_blocks - len(private) - num_fresh
        unhashed = [block for block in own if block.block_hash is not None][:num_unhashed]
        if len(unhashed) < num_unhashed:
            return None
        hashed = [block for block in in_windows if block.ref_cnt == 1 and block.block_hash is not None]
        # As above: without room for copies, they lose their hash.
        lost = unhashed + hashed if len(hashed) > num_free - num_fresh else unhashed
        if self.fronts is not None:
            self.fronts.lose(lost)
        self.block_pool.evict_blocks({block.block_id for block in lost})
        front = private + self.block_pool.get_new_blocks(num_fresh) + unhashed
        row[:num_replaced] = front + [self._null_block] * (num_replaced - num_front_blocks)
        blocks = [block.block_id for block in front]
        taken = set(blocks)
        retired = [block for block in held if block.block_id not in taken]
        if state.front is not None:
            self._note_unclean(retired)
        num_freed = len(retired) - num_fresh
        moves = [self._own_window(request_id, one, first, len(rows), retired) for one, first, rows in windows]
        state.given_up = retired
        places = new_front.places if new_front.share_blocks else 0
        state.front = Segments(new_front.entries, num_tokens, num_computed or num_tokens, places)
        return Relocation(blocks, num_freed, moves)

    def _windows_at(
        self, request_id: str, num_tokens: int
    ) -> list[tuple[SingleTypeKVCacheManager, int, list[KVCacheBlock]]]:
        """Of each group of layers with a window: what a request reads there after ``num_tokens``, from a row of its
        block table on."""
        found = []
        for one in self.windows:
            first, num_rows = self._num_passed(one, num_tokens), -(-num_tokens // one.block_size)
            found.append((one, first, one.req_to_blocks[request_id][first:num_rows]))
        return found

    def _own_window(
        self,
        request_id: str,
        manager: SingleTypeKVCacheManager,
        first: int,
        num_rows: int,
        given_up: list[KVCacheBlock],
    ) -> MoveWindow:
        """Gives a request blocks of its own in ``num_rows`` rows from ``first`` on, in place of those that others may
        read, which are added to ``given_up``."""
        table = manager.req_to_blocks[request_id]
        before = table[first : first + num_rows]
        for row, block in enumerate(before, first):
            if block.ref_cnt > 1 or block.block_hash is not None:
                given_up.append(block)
                (table[row],) = self.block_pool.get_new_blocks(1)
        after = table[first : first + num_rows]
        ids = ([block.block_id for block in blocks] for blocks in (before, after))
        return MoveWindow(request_id, manager.kv_cache_group_id, first, *ids)

    def shrink_front(self, state: RequestState, report: FrontReport) -> int:
        """Returns the blocks to the pool that a front turned out not to need; the number of them. A report of a front
        that has been replaced since is ignored.

        No step reads these blocks: heads' pages lie in the first ones from the beginning.
        """
        segments = state.front
        if segments is None or segments.changed_at != report.num_tokens:
            return 0
        row, end = self.req_to_blocks[state.request.request_id], segments.tail // self.block_size
        surplus = [block for block in row[report.num_blocks : end] if not block.is_null]
        row[report.num_blocks : end] = [self._null_block] * (end - report.num_blocks)
        self._note_unclean(surplus)
        self.block_pool.free_blocks(reversed(surplus))
        state.front = replace(segments, front=report.entries)
        return len(surplus)

    def retire_read(self, state: RequestState) -> None:
        """Retires what a request's compression gives up, whose last part follows the step."""
        self._retired += state.given_up
        state.given_up = []

    @property
    def num_free_after_step(self) -> int:
        """Free blocks of the pool once the retired ones have been returned."""
        return self.block_pool.get_num_free_blocks() + sum(block.ref_cnt == 1 for block in self._retired)

    def num_to_free(self, request_id: str, num_tokens: int, new_front: FrontSize) -> int:
        """Blocks that the pool gains if the request's first ``num_tokens`` become a front."""
        row = self.req_to_blocks[request_id]
        replaced = row[: max(new_front.num_blocks, num_tokens // self.block_size)]
        return sum(not block.is_null and block.ref_cnt == 1 for block in replaced) - new_front.num_blocks

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def release_retired(self) -> None:
        """Returns retired blocks to the pool, after all relocations of a step."""
        # Last blocks first, as vLLM frees a request: a prefix's tail is evicted before its head.
        self.block_pool.free_blocks(reversed(self._retired))
        self._retired = []

    def num_held_blocks(self, request_id: str) -> int:
        """Number of the pool's blocks that the request holds."""
        state = self.states.get(request_id)
        held = self.req_to_blocks.get(request_id, ()), () if state is None else state.given_up
        return sum(not block.is_null for blocks in held for block in blocks)

    def num_blocks_before(self, request_id: str, num_tokens: int) -> int:
        """Number of the pool's blocks that the request holds for its first ``num_tokens`` alone."""
        row = self.req_to_blocks.get(request_id, ())[: num_tokens // self.block_size]
        return sum(not block.is_null for block in row)

    def hashes_blocks_of(self, request: Request) -> bool:
        """Whether other requests may find the request's new blocks, of any layers, by hash."""
        # Once keys and values are approximations, so are hidden states of all layers.
        state = self.states.get(request.request_id)
        is_kept = state is None or (state.front is None and not state.hints.drop)
        return is_kept and not isinstance(request, InternalRequest)

    def _has_partial_local_hit(self, new_computed_blocks: Sequence[KVCacheBlock], num_computed_tokens: int) -> bool:
        # The block in which a front's tail begins is not among those that are taken over.
        covered = len(new_computed_blocks) * self.block_size
        return covered > num_computed_tokens and super()._has_partial_local_hit(
            new_computed_blocks, num_computed_tokens
        )

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, apply_admission_cap: bool = False, **kwargs: Any
    ) -> int:
        state = self.states.get(request_id)
        if apply_admission_cap and state is not None:  # vLLM asks whether the whole prompt finds room
            num_tokens = min(num_tokens, state.most_tokens)
        needed = super().get_num_blocks_to_allocate(
            request_id, num_tokens, *args, apply_admission_cap=apply_admission_cap, **kwargs
        )
        if state is not None and (offer := state.offer) is not None:
            # The copy of a block that is not full is the request's next block, which it needs in any case. The block
            # itself must stay until it has been copied.
            partial = offer.front.partial(self.block_size)
            needed += len(offer.copied) - len(partial) + self._get_num_evictable_blocks((*partial, *offer.passed))
        return needed

    def _begin_with_front(self, state: RequestState, num_full: int, offer: Offer) -> None:
        front, num_copied, request_id = offer.front, len(offer.copied), state.request.request_id
        self.block_pool.touch(front.blocks)
        for window in front.windows:  # before any of them is given to somebody; vLLM takes those that the request gets
            self.block_pool.touch(window.blocks)
            self._retired += window.blocks
        copies = dict(
            zip((one.block_id for one in offer.copied), self.block_pool.get_new_blocks(num_copied), strict=True)
        )
        # Nobody gets them in this step, before which they are copied.
        self._retired += offer.copied
        row = self._row(front, num_full + len(front.partial(self.block_size)))
        self.req_to_blocks[request_id] = [copies.get(block.block_id, block) for block in row]
        self.num_cached_block[request_id] = num_full
        state.front, state.offer = front.segments, None
        self._taken_over[request_id] = Takeover(front, list(copies), [copy.block_id for copy in copies.values()])

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **kwargs: Any
    ) -> None:
        if (state := self.states.get(request_id)) is not None:
            if state.offer is not None:
                self._begin_with_front(state, len(new_computed_blocks), state.offer)
                return
            state.num_hit_blocks = len(new_computed_blocks)
        for block in new_computed_blocks:
            self._superseded.pop(block.block_id, None)
        if self.enable_caching or not new_computed_blocks:
            super().add_local_computed_blocks(request_id, new_computed_blocks, *args, **kwargs)
            return
        # Requests that repeat a context share its blocks without a prefix cache too.
        super().add_local_computed_blocks(request_id, [], *args, **kwargs)
        self.block_pool.touch(new_computed_blocks)
        self.req_to_blocks[request_id].extend(new_computed_blocks)
        self.num_cached_block[request_id] = len(new_computed_blocks)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        blocks, state = super().pop_blocks_for_free(request_id), self.states.get(request_id)
        if state is not None:
            blocks += state.given_up
            if state.front is not None:
                self._note_unclean(blocks)
            state.front, state.offer, state.num_hit_blocks, state.given_up = None, None, 0, []
        return blocks

    def _note_unclean(self, blocks: list[KVCacheBlock]) -> None:
        # A hashed block is from before the first compression: the model itself computed its contents.
        self._unclean |= {block.block_id for block in blocks if block.block_hash is None and not block.is_null}

    def note_spoilt(self, block_ids: set[int]) -> None:
        """Notes blocks that workers fill with what must not be read."""
        self._unclean |= block_ids

    def take_unclean(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the blocks, handed out since the last call to any layers, that must be zeroed before they are
        used."""
        unclean = [block_id for block_id in block_ids if block_id in self._unclean]
        self._unclean.difference_update(unclean)
        return unclean


def compressed_group(config: KVCacheConfig) -> int:
    """Index of the group of layers that are compressed. Others have windows or states, and blocks of the same pool.

    Raises UnsupportedConfigError if there is not exactly one, or if other layers' cells are not laid out as theirs.
    """
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    ours = [index for index, spec in enumerate(specs) if isinstance(spec, MERGEABLE_SPECS)]
    others = [spec for spec in specs if not isinstance(spec, MERGEABLE_SPECS)]
    if len(ours) != 1 or any(type(spec) not in (*WINDOW_SPECS, MambaSpec) for spec in others):
        raise UnsupportedConfigError(
            "model layers: all without a window or a state must be full attention with one KV head count and size, and "
            "no more than those with one if there are such; vLLM groups these as "
            f"{[type(spec).__name__ for spec in specs]}"
        )
    if any(isinstance(spec, MambaSpec) and _saves_within_prompts(spec) for spec in others):
        raise UnsupportedConfigError(
            "enable_prefix_caching=True is not supported: where a state within a prompt is to be saved, vLLM's "
            "operators of the model's Mamba layers fail on the CPU, and none was tried on a GPU; allowed: "
            "--no-enable-prefix-caching"
        )
    if len(sizes := {spec.page_size_bytes for spec in specs}) > 1:
        raise UnsupportedConfigError(f"model layers: their pages must be of one size, got {sorted(sizes)} bytes")
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    # A block's keys and values lie at the same place for all groups, metadata of all blocks behind them.
    if len({spec.block_size * _row_bytes(spec) for spec in attention}) > 1:
        cells = sorted({(spec.block_size, spec.num_kv_heads, spec.head_size) for spec in attention})
        raise UnsupportedConfigError(
            "model layers: keys and values of a block must be as many bytes in those with a window as in the others, "
            f"got (block size, KV heads, head size) {cells}"
        )
    return ours[0]


def _row_bytes(spec: AttentionSpec) -> int:
    """Of a token's key and value in all heads."""
    return spec.num_kv_heads * 2 * spec.head_size * spec.dtype.itemsize


def with_equal_blocks(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Specs of layers by name, where those with a window may have heads of another size or number (Gemma 4).

    Then vLLM makes the blocks of one kind longer, so that pages agree. They do if cells are in proportion to heads,
    metadata included, which the layers with a window do not use."""
    full = next((spec for spec in specs.values() if isinstance(spec, MergeableAttentionSpec)), None)
    if full is None:
        return specs
    cell = cell_bytes(full.head_size, full.dtype)
    return {
        name: replace(spec, state_content_bytes=cell * spec.head_size // full.head_size)
        if type(spec) in WINDOW_SPECS
        else spec
        for name, spec in specs.items()
    }


def _saves_within_prompts(spec: MambaSpec) -> bool:
    return spec.mamba_cache_mode == "align" and spec.num_prefill_checkpoint_blocks > 0


def has_states(config: KVCacheConfig) -> bool:
    """True if blocks of the pool may hold states of Mamba or linear-attention layers."""
    return any(isinstance(group.kv_cache_spec, MambaSpec) for group in config.kv_cache_groups)


def window_blocks(config: KVCacheConfig, vllm_config: "VllmConfig") -> tuple[tuple[int, int], ...]:
    """``Limits.window_blocks``."""
    in_flight, length = vllm_config.max_in_flight_tokens, vllm_config.model_config.max_model_len
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return tuple(
        (
            spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes
            if isinstance(spec, MambaSpec)
            else spec.max_admission_blocks_per_request(in_flight, length),
            spec.block_size,
        )
        for spec in specs
        if isinstance(spec, (*WINDOW_SPECS, MambaSpec))
    )
