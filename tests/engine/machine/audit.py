"""What must be true of the scheduler's blocks after every operation, and once nothing is left."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, get_block_hash, get_group_id

from tests.engine.machine.setting import BLOCK_SIZE
from tests.engine.machine.worker import GROUPS, Worker, root
from vllm_kvmerge.engine.schedule import UNCOMPRESSED
from vllm_kvmerge.engine.scheduler import CompressionSchedulerMixin


class Audit:
    """taken: blocks that the test itself holds."""

    def __init__(self, scheduler: CompressionSchedulerMixin, worker: Worker) -> None:
        self._scheduler, self._worker = scheduler, worker
        self._pool = scheduler.kv_cache_manager.block_pool
        self._manager = scheduler._manager
        self.taken: list[KVCacheBlock] = []
        self._contents: dict[BlockHash, np.ndarray] = {}
        """What a block with a hash of the prefix cache must hold, in the first group."""
        self._hashed: dict[str, tuple[int, int]] = {}
        """By request: blocks whose hashes are known, and what the next token depends on."""

    def forget_hashes(self) -> None:
        """The model's weights have changed."""
        self._contents.clear()
        self._hashed.clear()

    def run(self) -> None:
        self._note_hashes()
        self._check_references()
        self._check_hashes()
        self._check_fronts()
        self._check_requests()

    def _note_hashes(self) -> None:
        for name, request in self._scheduler.requests.items():
            salt = self._worker.asked[name.partition("/")[0]].salt
            count, state = self._hashed.get(name, (0, root(salt, self._worker.epoch)))
            tokens = request.all_token_ids
            for index in range(count, len(request.block_hashes)):
                values = []
                for token in tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]:
                    state = hash((state, token))
                    values.append(state)
                self._contents[request.block_hashes[index]] = np.array(values)
            self._hashed[name] = len(request.block_hashes), state

    def _held(self) -> Counter[int]:
        """References to each block that somebody must give back."""
        held = Counter[int]()

        def add(blocks: Iterable[KVCacheBlock], number: int = 1) -> None:
            for block in blocks:
                held[block.block_id] += number

        for manager in self._scheduler._managers:
            for blocks in manager.req_to_blocks.values():
                add(block for block in blocks if not block.is_null)
        for state in self._manager.states.values():
            add(state.given_up)
        for front in self._scheduler._sharing._unshared.values():
            add(() if front is None else front.all_blocks)
        if (fronts := self._manager.fronts) is not None:
            for key, number in fronts._pinned.items():
                add(fronts._fronts[key].all_blocks, number)
        add(self.taken)
        return held

    def _check_references(self) -> None:
        assert not self._manager._retired, "blocks are retired between two steps"
        held, free = self._held(), 0
        for block in self._pool.blocks:
            if not block.is_null:
                number = held[block.block_id]
                assert block.ref_cnt == number, f"block {block.block_id} has {block.ref_cnt} references, not {number}"
                free += number == 0
        queue = self._pool.free_block_queue
        assert queue.num_free_blocks == free, f"{free} blocks are free, and {queue.num_free_blocks} in the queue"
        owners = Counter[int]()
        for manager in self._scheduler._managers:
            owners.update({block.block_id for row in manager.req_to_blocks.values() for block in row})
        assert all(number == 1 for block, number in owners.items() if block), (
            "a block is in two groups of layers' tables"
        )

    def _check_hashes(self) -> None:
        fronts, worker = self._manager.fronts, self._worker
        parts = {} if fronts is None else fronts._of_block
        for block in self._pool.blocks:
            others = self._pool.cached_block_hashes_by_block.get(block.block_id, ())
            if block.block_hash is None:
                assert not others, f"block {block.block_id} has other hashes, and no first one"
                continue
            of_fronts = set(parts.get(block.block_id, {}).values())
            for hashed in {block.block_hash, *others} - of_fronts:
                expected = self._contents.get(get_block_hash(hashed))
                assert expected is not None, f"block {block.block_id} has a hash that nobody knows"
                held = worker.content[block.block_id] ^ GROUPS[get_group_id(hashed)]
                assert (held == expected).all(), f"block {block.block_id} does not hold what its hash says"
                cached = self._pool.cached_block_hash_to_block.contain(hashed, block.block_id)
                assert cached, f"the hash of block {block.block_id} does not lead to it"

    def _check_fronts(self) -> None:
        if (fronts := self._manager.fronts) is None:
            return
        # The worker learns in the next step what has gone since.
        known = {*fronts._fronts, *fronts._expected, *fronts._forgotten}
        gone = set(self._worker.fronts) - known
        assert not gone, f"the worker keeps {len(gone)} fronts that the scheduler does not know"
        kept_turns = {turn.key for turn in self._scheduler._sharing._turns}
        for key, front in fronts._fronts.items():
            if key not in kept_turns:  # the worker hears of those in the next step
                windows = {
                    one.group: (one.first_row, [block.block_id for block in one.blocks]) for one in front.windows
                }
                self._worker.check_front(key, front.rows, (block.block_id for block in front.blocks), windows)
            for block in front.all_blocks:
                assert key in fronts._of_block[block.block_id], "a front's block is not known as one"

    def _check_requests(self) -> None:
        for request in self._scheduler.running:
            name = request.request_id
            sequence = self._worker.sequences.get(name)
            if sequence is None or sequence.computed != request.num_computed_tokens:
                continue  # preempted since, or about to begin
            self._worker.check_readable(name)
            state = self._manager.states.get(name)
            if state is not None and state.work is not None:
                continue
            segments = UNCOMPRESSED if state is None else state.segments
            known = segments.num_places, segments.tail, segments.changed_at
            expected = sequence.places, sequence.tail, sequence.changed_at
            assert known == expected, f"scheduler and worker do not hold the same of {name}"

    def run_at_end(self) -> None:
        """Nothing is left of any request, and what stays in the prefix cache can be given up."""
        scheduler, manager = self._scheduler, self._manager
        self.run()
        assert not scheduler.requests and not scheduler.running and not scheduler.waiting, "requests are left"
        free = self._pool.get_num_free_blocks()
        assert free == self._pool.num_gpu_blocks - 1, f"{free} of {self._pool.num_gpu_blocks - 1} blocks are free"
        for owner, names in (
            (manager, "states _taken_over"),
            (scheduler, "_sharing _failed _accounts"),
            (scheduler._repetitions, "orphans"),
            (scheduler._verifications, "_held _at_work"),
            (scheduler._contexts, "_asked"),
        ):
            for name in names.split():
                assert not (left := getattr(owner, name)), f"{name} are left: {left}"
        worker = self._worker
        assert not worker.sequences, f"the worker still knows {list(worker.sequences)}"
        fronts = manager.fronts
        if fronts is not None:
            assert not fronts._expected, "fronts are awaited that nobody makes"
            assert set(worker.fronts) == set(fronts._fronts), "worker and scheduler know different fronts"
            assert not fronts._pinned, "fronts are pinned that nobody keeps"
        known = {number for number, _ in scheduler._repetitions.known_scores._known.values()}
        assert set(worker.known_scores) == known, "worker and scheduler know different scores"
        assert scheduler.reset_prefix_cache(), "the prefix cache cannot be reset"
        if fronts is not None:
            assert not len(fronts) and not fronts._of_block and not fronts._turns, "fronts outlast a reset"
        assert not any(block.block_hash for block in self._pool.blocks), "hashes outlast a reset"
