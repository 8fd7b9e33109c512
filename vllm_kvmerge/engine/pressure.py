"""Compression under pressure (``trigger: pressure``): when the pool is short, and which requests are compressed."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from vllm_kvmerge.engine.blocks import MergeableAttentionManager
from vllm_kvmerge.engine.schedule import FrontSize, cdiv
from vllm_kvmerge.engine.state import RequestState
from vllm_kvmerge.policies.errors import PartError


@dataclass(frozen=True)
class Relief:
    """What the pool gains if a request is compressed: its new front, and blocks."""

    state: RequestState
    new_front: FrontSize
    num_blocks: int


class Pressure:
    """Shortages of blocks, and the requests whose compression ends them.

    step_tokens: most tokens of a step. watermark: blocks that vLLM leaves free
    when it admits a request. num_drafts: most drafts of a request in a step. is_async: a step is scheduled while the
    one before it is computed.
    """

    def __init__(
        self,
        manager: MergeableAttentionManager,
        step_tokens: int,
        watermark: int,
        num_drafts: int,
        is_async: bool,
    ) -> None:
        self._manager = manager
        self._step_tokens, self._watermark = step_tokens, watermark
        self._num_drafts, self._is_async = num_drafts, is_async
        self._asked = "", 0
        """The request that vLLM asked for last, and the blocks that it needs."""

    def begin_step(self) -> None:
        """Forgets which request found no room in the last step."""
        self._asked = "", 0

    def note_asked(self, request_id: str, num_blocks: int) -> None:
        """Notes that vLLM asks whether a request finds ``num_blocks``."""
        # First for all tokens of a request that waits, then for those of the step.
        name, most = self._asked
        self._asked = request_id, max(num_blocks, most) if name == request_id else num_blocks

    def fitting(self, request: Request, num_computed: int, num_new: int, pool_tokens: int) -> int:
        """How many of the ``num_new`` tokens find room if the request runs alone; all, if none does. One that is
        computed again may have been compressed before it came to as many. pool_tokens: that the pool has slots for."""
        block_size = self._manager.block_size
        processed = num_computed - request.num_in_flight_tokens
        held = self._manager.num_held_blocks(request.request_id) or num_computed // block_size
        held += sum(
            self._num_rows(one, request, num_computed) - _passed(one, processed) for one in self._manager.windows
        )
        free, managers = pool_tokens // block_size - held, (self._manager, *self._manager.windows)

        def num_blocks(num_tokens: int) -> int:
            return sum(cdiv(num_computed + num_tokens, size) - cdiv(num_computed, size) for size in sizes)

        sizes = [one.block_size for one in managers]
        room = bisect_right(range(num_new + 1), free, key=num_blocks) - 1
        return room if room > 0 else num_new

    def reliefs(
        self,
        running: Sequence[Request],
        first_waiting: Request | None,
        asleep: Iterable[RequestState],
        on_error: Callable[[str, PartError], None],
    ) -> list[Relief]:
        """The compressions of requests ``asleep`` that end a shortage, largest gain first; none if there is none.

        Blocks are missing for the next step of the ``running`` requests, for which all is done that can be, or for the
        first waiting one, for which nothing is done if that would not be enough.
        """
        missing = self._needed_next(running) - self._manager.num_free_after_step
        awaited = 0 if first_waiting is None else self._awaited(first_waiting)
        if missing <= 0 and (not awaited or missing + awaited <= 0):
            return []
        # Between equals the order of requests decides.
        possible = sorted(self._possible(asleep, on_error), key=lambda one: -one.num_blocks)
        if awaited and missing + awaited <= sum(one.num_blocks for one in possible):
            missing += awaited
        chosen = []
        for one in possible:
            if missing <= 0:
                break
            chosen.append(one)
            missing -= one.num_blocks
        return chosen

    def _needed_next(self, running: Iterable[Request]) -> int:
        """Most blocks that running requests take in another step, one after the other: before one takes any, windows
        that have moved on give some back."""
        left, taken, most = self._step_tokens, 0, 0
        windows = self._manager.windows
        for request in running:
            computed = request.num_computed_tokens
            new = max(1 + self._num_drafts, min(request.num_tokens - computed, left))
            taken -= sum(self._num_given_back(one, request) for one in windows)
            for one in (self._manager, *windows):
                num_rows = cdiv(computed + new, one.block_size)
                taken += max(0, num_rows - len(one.req_to_blocks[request.request_id]))
            left, most = left - new, max(most, taken)
        return most

    def _num_given_back(self, manager: SingleTypeKVCacheManager, request: Request) -> int:
        """Blocks that the pool gets from a request's window at the beginning of the next step."""
        # vLLM waits until no step in flight reads them.
        in_flight = request.num_in_flight_tokens if self._is_async else 0
        computed = request.num_computed_tokens - in_flight
        passed = manager.req_to_blocks[request.request_id][: _passed(manager, computed)]
        return sum(not block.is_null and block.ref_cnt == 1 for block in passed)

    def _num_rows(self, manager: SingleTypeKVCacheManager, request: Request, num_computed: int) -> int:
        """Rows of a request's block table; of one that waits, those that it has found in the prefix cache."""
        return len(manager.req_to_blocks.get(request.request_id, ())) or num_computed // manager.block_size

    def _awaited(self, request: Request) -> int:
        """Blocks that a waiting request needs, if the step found no room for it; otherwise 0."""
        request_id, needed = self._asked
        return needed + self._watermark if request_id == request.request_id else 0

    def _possible(self, states: Iterable[RequestState], on_error: Callable[[str, PartError], None]) -> Iterable[Relief]:
        for state in states:
            request_id, num_computed = state.request.request_id, state.request.num_computed_tokens
            if not state.schedule.may_relieve(state.segments, num_computed):
                continue
            try:
                new_front = state.schedule.new_front(state.segments, num_computed)
            except PartError as error:
                on_error(request_id, error)
                continue
            num_blocks = self._manager.num_to_free(request_id, num_computed, new_front)
            if num_blocks > 0:
                yield Relief(state, new_front, num_blocks)


def _passed(manager: SingleTypeKVCacheManager, num_computed: int) -> int:
    """First rows of a block table that no query reads after ``num_computed`` tokens."""
    return manager.get_num_skipped_tokens(num_computed) // manager.block_size
