"""Contexts that requests share: who leaves compressed fronts in the prefix cache, and who begins with one."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from vllm_kvmerge.engine.accounting import Accounts
from vllm_kvmerge.engine.blocks import MergeableAttentionManager
from vllm_kvmerge.engine.fronts import PART, TURN, FrontCache, HeldWindow, SharedFront
from vllm_kvmerge.engine.messages import Adopt, CompressionReport, Keep
from vllm_kvmerge.engine.metrics import count_context
from vllm_kvmerge.engine.schedule import RequestCompression, cdiv
from vllm_kvmerge.engine.state import RequestState
from vllm_kvmerge.policies.errors import PartError


class ContextSharing:
    """The scheduler's side of shared contexts. Without a ``FrontCache`` of its ``manager`` none are shared.

    engine: the scheduler's index. accounts: of what requests were given.
    """

    def __init__(self, manager: MergeableAttentionManager, engine: int, accounts: Accounts) -> None:
        self._manager, self._engine, self._accounts = manager, engine, accounts
        self._unshared: dict[BlockHash, SharedFront | None] = {}
        """Fronts that steps in flight make: the copies that they are in, or None where their requests hold them."""
        self._cleared = Counter[BlockHash]()
        """Of fronts that steps in flight make and nobody wants any more: how many such steps there are."""
        self._turns: list[Keep] = []
        """Of requests that have ended since the last step."""

    def __len__(self) -> int:
        """Number of steps in flight that it knows."""
        return len(self._unshared) + len(self._cleared)

    def keys(self, request: Request, schedule: RequestCompression) -> dict[int, BlockHash]:
        """``RequestState.keys``; none: its context is not shared."""
        fronts = self._manager.fronts
        if fronts is None or not schedule.shares_context:
            return {}
        keys = {schedule.context: fronts.key(request, schedule.context, schedule.config.front_policy)}
        try:
            parts = schedule.parts_of_context()
        except PartError:  # it is told when the compression is due
            parts = []
        # A share of a longer context is another budget.
        policy = schedule.config.front_policy, PART, str(schedule.budget)
        keys |= {count: fronts.key(request, count, *policy) for count in reversed(parts)}
        return {count: key for count, key in keys.items() if key is not None}

    def front_of(self, state: RequestState) -> SharedFront | None:
        """The front of the request's context, if it is in the prefix cache."""
        key, fronts = state.keys.get(state.schedule.context), self._manager.fronts
        return None if key is None or fronts is None else fronts.find(key)

    def first_front(self, state: RequestState) -> SharedFront | None:
        """What the request can begin with in the prefix cache: the longest turn, otherwise its context's front, or that
        of the longest part of it."""
        fronts, request, schedule = self._manager.fronts, state.request, state.schedule
        if fronts is None or request.skip_reading_prefix_cache:
            return None
        turn = None
        if schedule.config.reuse == "turns":
            turn = fronts.find_turn(request, schedule.config.front_policy)
            due_at = None if turn is None else schedule.next_compression(turn.segments)
            if turn is not None and due_at is not None and due_at <= turn.num_tokens:
                turn = None  # it is left over from a larger budget
            # A front of the whole prompt is of somebody who has asked the same, but not of this session.
            if turn is not None and (
                schedule.context < turn.num_tokens or schedule.context == request.num_prompt_tokens
            ):
                return turn
        front = self.front_of(state)
        # The last token's slot must not be one of the front's.
        if front is not None and len(front.blocks) <= (request.num_tokens - 1) // self._manager.block_size:
            return front
        parts = (key for num_tokens, key in state.keys.items() if num_tokens < schedule.context)
        part = next((found for key in parts if (found := fronts.find(key)) is not None), None)
        return max((one for one in (turn, part) if one is not None), key=lambda one: one.num_tokens, default=None)

    def adoptions(self) -> dict[str, Adopt]:
        """Of the requests that vLLM has just given fronts."""
        adoptions, block_size = dict[str, Adopt](), self._manager.block_size
        for request_id, taken in self._manager.take_takeovers().items():
            state, front = self._manager.states[request_id], taken.front
            schedule, restores_output = state.schedule, front.num_tokens == state.request.num_tokens
            restored = self._restored_windows(request_id, front) if restores_output else []
            adoptions[request_id] = Adopt(
                key=front.key,
                compression=schedule.config.text,
                front=front.segments.num_places,
                tail=front.segments.tail,
                num_tokens=front.num_tokens,
                is_partial=schedule.is_in_context(front.segments),
                query_window=schedule.query_window,
                sources=taken.sources,
                blocks=taken.blocks,
                restores_output=restores_output,
                exact=[source for source, _ in restored],
                restored=[target for _, target in restored],
            )
            if restores_output and front.num_tokens % block_size == 0:
                self._manager.retire(request_id, front.num_tokens // block_size - 1)
            state.adopted()
            self._accounts.note_reused(request_id, front)
            count_context(state.policy, self._engine, front.num_tokens)
        return adoptions

    def _restored_windows(self, request_id: str, front: SharedFront) -> list[tuple[int, int]]:
        """Of layers with a window, ids of the front's last block and of the request's own, to which the last token is
        written once more."""
        pairs = []
        for one, held in zip(self._manager.windows, front.windows, strict=True):
            row = (front.num_tokens - 1) // one.block_size
            pairs.append((held.blocks[row - held.first_row].block_id, one.req_to_blocks[request_id][row].block_id))
        return pairs

    def new_contexts(self, request_ids: Iterable[str]) -> list[str]:
        """Those of a step's requests whose contexts end with it, and are shared."""
        return [
            request_id
            for request_id in request_ids
            if (state := self._manager.states.get(request_id)) is not None
            and state.schedule.context in state.keys
            and state.request.num_computed_tokens == state.schedule.context
            and state.schedule.is_in_context(state.segments)
        ]

    def plan(self, state: RequestState, blocks: list[int]) -> Keep | None:
        """What workers keep of the front of what the request has computed, its context or a part of it, that a
        compression makes in ``blocks`` (ids); None: it is not shared."""
        fronts, schedule, num_tokens = self._manager.fronts, state.schedule, state.request.num_computed_tokens
        is_whole = num_tokens >= schedule.context
        key = state.keys.get(min(num_tokens, schedule.context))
        if key is None or fronts is None:
            return None
        if is_whole:
            count_context(state.policy, self._engine, 0)
        # New tokens may go to the last block of a front that saves none.
        if state.hints.drop or fronts.is_known(key) or len(blocks) > num_tokens // self._manager.block_size:
            return None
        # The next compression cannot write to the blocks of a part that is shared.
        if not is_whole and 2 * len(blocks) > self._manager.block_pool.get_num_free_blocks():
            return None
        front, copies = None, list[KVCacheBlock]()
        if schedule.config.tracks(is_partial=not is_whole):
            windows = self._manager.hold_windows(state.request.request_id, num_tokens)
            if windows is None:
                return None
            taken = self._manager.copy_of(len(blocks))
            if taken is None:
                self._manager.block_pool.free_blocks(block for one in windows for block in one.blocks)
                return None
            copies, front = taken, _front_of_context(key, state, taken, windows)
        self._unshared[key] = front
        fronts.expect(key)
        keeps_queries = schedule.shared_bytes(num_tokens) > 0
        copied = [block.block_id for block in copies]
        request = state.request
        return Keep(request.request_id, key, num_tokens, keeps_queries, copied, request.num_preemptions)

    def share(self, kept: Keep, report: CompressionReport) -> None:
        """Puts a front that workers have made, and kept, into the prefix cache, unless that failed."""
        fronts, key = self._manager.fronts, BlockHash(kept.key)
        assert fronts is not None
        if self._cleared[key]:
            self._cleared -= Counter([key])  # drops those whose number is 0
            return
        request_id, num_tokens = kept.request_id, kept.num_tokens
        front, state = self._unshared.pop(key), self._manager.states.get(request_id)  # None: it has ended
        reported = report.fronts.get(request_id)
        windows = None
        current = None if state is None else (state.segments.changed_at, state.request.num_preemptions)
        if front is None and current == (num_tokens, kept.num_preemptions):
            windows = self._manager.hold_windows(request_id, num_tokens)
        if state is not None and windows is not None:
            row = self._manager.req_to_blocks[request_id][: num_tokens // self._manager.block_size]
            blocks = [block for block in row if not block.is_null]  # without those that it turned out not to need
            self._manager.block_pool.touch(blocks)
            front = _front_of_context(key, state, blocks, windows)
        elif front is not None and reported is not None:
            self._manager.discard(front.blocks[reported.num_blocks :])
            front = replace(
                front,
                segments=replace(front.segments, front=reported.entries),
                rows=front.rows[: reported.num_blocks],
                blocks=front.blocks[: reported.num_blocks],
            )
        if front is not None and request_id not in report.failures:
            self._manager.share(replace(front, kept=report.counts.get(request_id)))
        else:
            self._give_up(fronts, key, front)

    def drop(self, kept: Keep | None) -> None:
        """Forgets the front of a compression that is not carried out to the end."""
        if kept is not None and self._manager.fronts is not None:
            key = BlockHash(kept.key)
            self._give_up(self._manager.fronts, key, self._unshared.pop(key))

    def clear(self) -> None:
        """Forgets the fronts that steps in flight make. They still write to the copies, before whoever gets the blocks
        next; their requests may come to make fronts with the same keys before the steps' outputs are there."""
        for key, front in self._unshared.items():
            assert self._manager.fronts is not None
            self._give_up(self._manager.fronts, key, front)
        self._cleared.update(self._unshared.keys())
        self._unshared.clear()

    def _give_up(self, fronts: FrontCache, key: BlockHash, front: SharedFront | None) -> None:
        if front is not None:
            self._manager.discard(front.all_blocks)
        fronts.forget(key)

    def keep_turn(self, state: RequestState) -> SharedFront | None:
        """Leaves what a request holds that ends as it should in the prefix cache, if it asked for that; the turn."""
        fronts, request, schedule = self._manager.fronts, state.request, state.schedule
        if fronts is None or schedule.config.reuse != "turns" or state.hints.drop:
            return None
        # A step in flight has computed the last token too, and has counted its query.
        segments, num_tokens = state.segments, request.num_tokens - 1
        if request.num_in_flight_tokens and segments.tail <= num_tokens:
            num_tokens = min(request.num_tokens, request.num_computed_tokens)
        # vLLM takes a hit without a full block for none.
        is_whole = segments.are_compressed and segments.tail <= num_tokens <= request.num_computed_tokens
        is_whole = is_whole and num_tokens >= self._manager.block_size
        if request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED) or not is_whole:
            return None
        policy = schedule.config.front_policy
        key = fronts.key(request, num_tokens, policy, TURN)
        if key is None or key in fronts:
            return None if key is None else fronts.find(key)
        windows = self._manager.hold_windows(request.request_id, num_tokens)
        if windows is None:
            return None
        table = self._manager.req_to_blocks[request.request_id][: cdiv(num_tokens, self._manager.block_size)]
        rows, blocks = zip(*((row, block) for row, block in enumerate(table) if not block.is_null), strict=True)
        self._manager.block_pool.touch(blocks)
        turn, num_bytes = fronts.turn(request, num_tokens, policy), schedule.shared_bytes(num_tokens)
        kept = self._accounts.kept(request.request_id)
        front = SharedFront(key, segments, num_tokens, rows, blocks, num_bytes, turn, kept, windows)
        self._manager.share(front)
        self._turns.append(Keep(request.request_id, key, num_tokens, num_bytes > 0))
        return front

    @property
    def has_turns(self) -> bool:
        return bool(self._turns)

    def take_turns(self) -> list[Keep]:
        """Turns kept since the last call."""
        turns, self._turns = self._turns, []
        return turns


def _front_of_context(
    key: BlockHash, state: RequestState, blocks: list[KVCacheBlock], windows: tuple[HeldWindow, ...]
) -> SharedFront:
    segments = state.segments
    rows, num_bytes = tuple(range(len(blocks))), state.schedule.shared_bytes(segments.tail)
    return SharedFront(key, segments, segments.tail, rows, tuple(blocks), num_bytes, windows=windows)
