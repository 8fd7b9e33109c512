"""Blocks of the pool that nothing may read, for ``PluginConfig.debug_poison_freed``."""

from collections.abc import Iterable

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.blocks import MergeableAttentionManager


class FreedBlocks:
    """Free blocks of a pool, but for those in the prefix cache, and blocks that a step hands out, whatever they held.

    Workers fill them before the step. A block that the step gives up is still read in it, so it is among the next
    step's.
    """

    def __init__(self, pool: BlockPool, manager: MergeableAttentionManager) -> None:
        self._pool, self._manager = pool, manager
        self._poisoned: set[int] = set()
        """Blocks that nobody has had since they were filled."""
        self._due: set[int] = set()
        compat.watch_new_blocks(pool, self._note_new)

    def begin_step(self) -> None:
        """Notes what is free. What was handed out between steps, such as to contexts from files, has been written."""
        free = {
            block.block_id
            for block in self._pool.blocks
            if not block.ref_cnt and block.block_hash is None and not block.is_null
        }
        self._due = free - self._poisoned
        self._poisoned = free

    def _note_new(self, blocks: Iterable[KVCacheBlock]) -> None:
        ids = {block.block_id for block in blocks}
        # Known already, or else in the prefix cache or given up since the step began.
        self._due |= ids - self._poisoned
        self._poisoned -= ids
        self._manager.note_spoilt(ids)

    def take(self) -> list[int]:
        """Ids of the blocks that workers fill before the step."""
        due, self._due = self._due, set()
        return sorted(due)
