"""The block manager alone: which blocks a relocation copies, reuses, frees and never touches."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvmerge.engine.blocks import MergeableAttentionManager, MergeableAttentionSpec
from vllm_kvmerge.engine.schedule import FrontSize, Segments
from vllm_kvmerge.engine.state import RequestState

BLOCK_SIZE = 32
NUM_BLOCKS = 20


@pytest.fixture
def manager() -> MergeableAttentionManager:
    dense = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return MergeableAttentionManager(
        MergeableAttentionSpec.of(dense),
        block_pool=BlockPool(NUM_BLOCKS + 1, enable_caching=True, hash_block_size=BLOCK_SIZE),
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


def share(manager, request_id: str, blocks: list[KVCacheBlock]) -> None:
    manager.block_pool.touch(blocks)
    manager.req_to_blocks[request_id] = list(blocks)


def state_of(manager, request_id: str) -> RequestState:
    request = SimpleNamespace(request_id=request_id)
    return manager.states.setdefault(request_id, RequestState(request, None, 1000))  # type: ignore[arg-type]


def relocate(manager, request_id: str, num_tokens: int, new_front: int):
    """To the end of the step."""
    state = state_of(manager, request_id)
    relocation = manager.relocate(state, num_tokens, FrontSize.even(new_front, BLOCK_SIZE))
    if relocation is not None:
        manager.retire_read(state)
        manager.release_retired()
    return relocation


def num_free(manager) -> int:
    return manager.block_pool.get_num_free_blocks()


def test_private_blocks_are_reused_and_the_hole_is_freed(manager):
    blocks = give(manager, "a", 7)
    state = state_of(manager, "a")
    relocation = manager.relocate(state, num_tokens=6 * BLOCK_SIZE + 5, new_front=FrontSize.even(40, BLOCK_SIZE))
    assert relocation.blocks == [b.block_id for b in blocks[:2]]
    null = manager.block_pool.null_block
    assert relocation.num_freed == 4
    assert manager.req_to_blocks["a"] == [*blocks[:2], *[null] * 4, blocks[6]]  # the last holds the next token's slot
    assert state.front == Segments(40, tail=6 * BLOCK_SIZE + 5, changed_at=6 * BLOCK_SIZE + 5)
    assert num_free(manager) == NUM_BLOCKS - 7
    manager.retire_read(state)
    manager.release_retired()
    assert num_free(manager) == NUM_BLOCKS - 3 and manager.num_held_blocks("a") == 3
    manager.free("a")
    assert num_free(manager) == NUM_BLOCKS and state.front is None


def test_hashed_blocks_are_copied_and_stay_findable(manager):
    blocks = give(manager, "a", 4, hashed=4)
    share(manager, "b", blocks[:3])
    others = relocate(manager, "b", 3 * BLOCK_SIZE, BLOCK_SIZE)
    relocation = relocate(manager, "a", 4 * BLOCK_SIZE, 50)
    assert not {*relocation.blocks, *others.blocks} & {b.block_id for b in blocks} and relocation.num_freed == 2
    assert all(b.block_hash is not None and b.ref_cnt == 0 for b in blocks)
    assert num_free(manager) == NUM_BLOCKS - 3
    # They are as good as new ones next time: it happens in place.
    manager.allocate_new_blocks("a", 6 * BLOCK_SIZE, 6 * BLOCK_SIZE)
    again = relocate(manager, "a", 6 * BLOCK_SIZE, 40)
    assert (again.blocks, again.num_freed, manager.num_held_blocks("a")) == (relocation.blocks, 2, 2)


def test_without_free_blocks_hashed_ones_lose_their_hash(manager):
    blocks = give(manager, "a", NUM_BLOCKS - 1, hashed=NUM_BLOCKS - 1)
    (free,) = (b for b in manager.block_pool.blocks if b.ref_cnt == 0 and not b.is_null)
    relocation = relocate(manager, "a", (NUM_BLOCKS - 1) * BLOCK_SIZE, 3 * BLOCK_SIZE)
    assert relocation.blocks == [free.block_id, blocks[0].block_id, blocks[1].block_id]
    assert [b.block_hash is None for b in blocks] == [True] * 2 + [False] * (NUM_BLOCKS - 3)
    manager.free("a")
    assert num_free(manager) == NUM_BLOCKS


def test_private_blocks_of_the_hole_replace_shared_ones(manager):
    blocks = give(manager, "a", 6, hashed=2)
    share(manager, "b", blocks[:2])
    manager.block_pool.get_new_blocks(num_free(manager))  # others hold the rest of the pool
    relocation = relocate(manager, "a", 6 * BLOCK_SIZE, 2 * BLOCK_SIZE)
    assert relocation.blocks == [blocks[2].block_id, blocks[3].block_id]
    assert relocation.num_freed == 4 and num_free(manager) == 2  # "b" still holds two of them
    assert [b.ref_cnt for b in blocks[:2]] == [1, 1]


def test_without_room_for_a_copy_of_shared_blocks_nothing_changes(manager):
    blocks = give(manager, "a", NUM_BLOCKS, hashed=5)
    share(manager, "b", blocks)
    assert relocate(manager, "b", NUM_BLOCKS * BLOCK_SIZE, 40) is None
    assert manager.req_to_blocks["b"] == blocks and manager.states["b"].front is None
    assert [b.ref_cnt for b in blocks] == [2] * NUM_BLOCKS
    assert [b.block_hash is not None for b in blocks] == [True] * 5 + [False] * (NUM_BLOCKS - 5)
