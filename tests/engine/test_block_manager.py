"""The block manager alone: which blocks a relocation copies, reuses, frees and never touches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.examples import examples
from vllm_kvmerge.engine.blocks import MergeableAttentionManager, MergeableAttentionSpec
from vllm_kvmerge.engine.plan import FrontSize, Segments

BLOCK_SIZE = 32
NUM_BLOCKS = 20


@pytest.fixture
def manager() -> MergeableAttentionManager:
    return make_manager()


def make_manager() -> MergeableAttentionManager:
    dense = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    pool = BlockPool(NUM_BLOCKS + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)
    return MergeableAttentionManager(
        MergeableAttentionSpec.of(dense),
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK_SIZE,
    )


def give(manager, request_id: str, count: int, hashed: int = 0) -> list[KVCacheBlock]:
    """Blocks for a request, the first ``hashed`` of them found by hash."""
    blocks = manager.block_pool.get_new_blocks(count)
    for block in blocks[:hashed]:
        key = make_block_hash_with_group_id(bytes(str(block.block_id), "ascii"), 0)
        block.set_block_hash(key, num_tokens=BLOCK_SIZE)
        manager.block_pool.cached_block_hash_to_block.insert(key, block)
    manager.req_to_blocks[request_id] = blocks
    return list(blocks)


def num_free(manager) -> int:
    return manager.block_pool.get_num_free_blocks()


def test_the_spec_counts_the_metadata():
    for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2)):
        dense = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=dtype)
        wide = MergeableAttentionSpec.of(dense)
        assert wide.page_size_bytes == BLOCK_SIZE * 2 * (2 * 64 * itemsize + 16)
        assert MergeableAttentionSpec.merge([wide, wide]) == wide


def test_private_blocks_are_reused_and_the_hole_is_freed(manager):
    blocks = give(manager, "a", 7)
    relocation = manager.relocate("a", num_tokens=6 * BLOCK_SIZE + 5, new_front=FrontSize.even(40, BLOCK_SIZE))
    assert relocation.blocks == [b.block_id for b in blocks[:2]]
    assert relocation.hole == [manager.block_pool.null_block.block_id] * 4
    assert relocation.num_freed == 4
    row = manager.req_to_blocks["a"]
    assert [b.block_id for b in row] == [*relocation.blocks, *relocation.hole, blocks[6].block_id]
    assert [b.is_null for b in row] == [False, False, True, True, True, True, False]
    assert row[6] is blocks[6]  # it holds the next token's slot
    assert manager.segments["a"] == Segments(40, tail=6 * BLOCK_SIZE + 5, changed_at=6 * BLOCK_SIZE + 5)
    assert num_free(manager) == NUM_BLOCKS - 7
    manager.retire_read("a")
    manager.release_retired()
    assert num_free(manager) == NUM_BLOCKS - 3
    assert manager.num_held_blocks("a") == 3
    manager.free("a")
    assert num_free(manager) == NUM_BLOCKS
    assert manager.segments == {}


def test_hashed_blocks_are_copied_and_stay_findable(manager):
    blocks = give(manager, "a", 4, hashed=4)
    relocation = manager.relocate("a", num_tokens=4 * BLOCK_SIZE, new_front=FrontSize.even(50, BLOCK_SIZE))
    assert not set(relocation.blocks) & {b.block_id for b in blocks}
    assert relocation.num_freed == 2
    manager.retire_read("a")
    manager.release_retired()
    assert all(b.block_hash is not None and b.ref_cnt == 0 for b in blocks)
    assert num_free(manager) == NUM_BLOCKS - 2
    manager.free("a")
    assert num_free(manager) == NUM_BLOCKS


def test_shared_blocks_are_copied(manager):
    blocks = give(manager, "a", 3, hashed=3)
    manager.block_pool.touch(blocks)
    manager.req_to_blocks["b"] = list(blocks)
    relocation = manager.relocate("b", num_tokens=3 * BLOCK_SIZE, new_front=FrontSize.even(BLOCK_SIZE, BLOCK_SIZE))
    manager.retire_read("b")
    manager.release_retired()
    assert relocation.blocks[0] != blocks[0].block_id
    assert [b.ref_cnt for b in blocks] == [1, 1, 1]
    assert manager.req_to_blocks["a"] == blocks
    for request_id in "ab":
        manager.free(request_id)
    assert num_free(manager) == NUM_BLOCKS


def test_without_free_blocks_hashed_ones_lose_their_hash(manager):
    blocks = give(manager, "a", NUM_BLOCKS - 1, hashed=NUM_BLOCKS - 1)
    (free,) = (b for b in manager.block_pool.blocks if b.ref_cnt == 0 and not b.is_null)
    relocation = manager.relocate(
        "a", num_tokens=(NUM_BLOCKS - 1) * BLOCK_SIZE, new_front=FrontSize.even(3 * BLOCK_SIZE, BLOCK_SIZE)
    )
    assert relocation.blocks == [free.block_id, blocks[0].block_id, blocks[1].block_id]
    assert [b.block_hash is None for b in blocks] == [True] * 2 + [False] * (NUM_BLOCKS - 3)
    manager.retire_read("a")
    manager.release_retired()
    manager.free("a")
    assert num_free(manager) == NUM_BLOCKS


def test_private_blocks_of_the_hole_replace_shared_ones(manager):
    blocks = give(manager, "a", 6, hashed=2)
    manager.block_pool.touch(blocks[:2])
    manager.req_to_blocks["b"] = blocks[:2]
    manager.block_pool.get_new_blocks(num_free(manager))  # others hold the rest of the pool
    relocation = manager.relocate("a", num_tokens=6 * BLOCK_SIZE, new_front=FrontSize.even(2 * BLOCK_SIZE, BLOCK_SIZE))
    assert relocation.blocks == [blocks[2].block_id, blocks[3].block_id]
    assert relocation.num_freed == 4  # two of them are still held by "b"
    manager.retire_read("a")
    manager.release_retired()
    assert num_free(manager) == 2
    assert [b.ref_cnt for b in blocks[:2]] == [1, 1]


def test_without_room_for_a_copy_of_shared_blocks_nothing_changes(manager):
    blocks = give(manager, "a", NUM_BLOCKS, hashed=5)
    manager.block_pool.touch(blocks)
    manager.req_to_blocks["b"] = list(blocks)
    assert manager.relocate("b", num_tokens=NUM_BLOCKS * BLOCK_SIZE, new_front=FrontSize.even(40, BLOCK_SIZE)) is None
    assert manager.req_to_blocks["b"] == blocks
    assert [b.ref_cnt for b in blocks] == [2] * NUM_BLOCKS
    assert [b.block_hash is not None for b in blocks] == [True] * 5 + [False] * (NUM_BLOCKS - 5)
    assert manager.segments == {}


def test_a_second_compression_happens_in_place(manager):
    give(manager, "a", 6, hashed=6)
    first = manager.relocate("a", num_tokens=6 * BLOCK_SIZE, new_front=FrontSize.even(40, BLOCK_SIZE))
    manager.retire_read("a")
    manager.release_retired()
    manager.allocate_new_blocks("a", 8 * BLOCK_SIZE, 8 * BLOCK_SIZE)
    second = manager.relocate("a", num_tokens=8 * BLOCK_SIZE, new_front=FrontSize.even(40, BLOCK_SIZE))
    manager.retire_read("a")
    manager.release_retired()
    assert second.blocks == first.blocks
    assert second.num_freed == 2
    assert manager.num_held_blocks("a") == 2


def test_a_front_as_long_as_the_sequence_is_a_copy(manager):
    """A tracking policy whose prompt fits the budget: nothing is freed, and no hashed block is written to."""
    blocks = give(manager, "a", 3, hashed=2)
    relocation = manager.relocate("a", num_tokens=70, new_front=FrontSize.even(70, BLOCK_SIZE))
    assert (relocation.num_freed, relocation.hole) == (0, [])
    assert blocks[2].block_id in relocation.blocks
    assert not {blocks[0].block_id, blocks[1].block_id} & set(relocation.blocks)
    manager.retire_read("a")
    manager.release_retired()
    assert num_free(manager) == NUM_BLOCKS - 3


@examples(100)
@given(st.data())
def test_no_plan_of_a_step_writes_what_another_reads(data):
    """Whichever order a worker executes a step's plans in, each finds its entries as the step left them."""
    manager = make_manager()
    draw = data.draw
    lengths: dict[str, int] = {}
    for request_id in "abc":
        if num_free(manager) < 2:
            break
        count = draw(st.integers(1, min(6, num_free(manager) - 1)))
        shared = []
        if lengths and draw(st.booleans()):
            other = manager.req_to_blocks[draw(st.sampled_from(sorted(lengths)))]
            shared = [block for block in other[: draw(st.integers(0, 4))] if block.block_hash is not None]
            manager.block_pool.touch(shared)
        give(manager, request_id, count, hashed=draw(st.integers(0, count)))
        manager.req_to_blocks[request_id][:0] = shared
        lengths[request_id] = len(manager.req_to_blocks[request_id]) * BLOCK_SIZE - draw(st.integers(0, BLOCK_SIZE - 1))
    for _ in range(3):  # steps
        reads: dict[str, set[int]] = {}
        writes: dict[str, set[int]] = {}
        for request_id in draw(st.permutations(sorted(lengths))):
            before = {block.block_id for block in manager.req_to_blocks[request_id] if not block.is_null}
            segments = manager.segments.get(request_id, Segments(0, 0))
            num_live = segments.front + lengths[request_id] - segments.tail
            new_front = draw(st.integers(1, num_live))
            size = FrontSize.even(new_front, BLOCK_SIZE)
            relocation = manager.relocate(request_id, lengths[request_id], size)
            if relocation is not None:
                reads[request_id], writes[request_id] = before, set(relocation.blocks)
        for one in writes:
            for other in set(lengths) - {one}:
                held = {block.block_id for block in manager.req_to_blocks[other] if not block.is_null}
                assert not writes[one] & (reads.get(other, set()) | writes.get(other, set()) | held)
        for request_id in writes:
            manager.retire_read(request_id)
        manager.release_retired()
        for request_id in lengths:  # the next tokens, in blocks that a plan may just have given back
            if num_free(manager) < 2:
                break
            lengths[request_id] += draw(st.integers(0, BLOCK_SIZE))
            num_tokens = lengths[request_id]
            manager.allocate_new_blocks(request_id, num_tokens, num_tokens)
