"""Compressions after a step: those that are due, parts of a long one, and those that relieve a shortage of blocks."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count

from vllm.v1.request import Request

from vllm_kvmerge.engine.accounting import Accounts
from vllm_kvmerge.engine.blocks import MergeableAttentionManager
from vllm_kvmerge.engine.internal_requests import InternalRequest
from vllm_kvmerge.engine.messages import Compress, CompressionReport, CompressionStep, Purpose
from vllm_kvmerge.engine.metrics import BLOCKS_FREED, BYTES_FREED, COMPRESSIONS, REFRESHES, RELIEFS
from vllm_kvmerge.engine.pressure import Pressure
from vllm_kvmerge.engine.schedule import FrontSize
from vllm_kvmerge.engine.sharing import ContextSharing
from vllm_kvmerge.engine.spreading import LEAST_SECONDS, STEP_SECONDS, Pace, SpreadCompression
from vllm_kvmerge.engine.state import RequestState
from vllm_kvmerge.policies.errors import PartError


class Planner:
    """Plans the compressions of running requests.

    num_heads: KV heads of all layers. bytes_per_block: over all workers. engine: its index. fail: ends a request, by
    id, with an error.
    """

    def __init__(
        self,
        manager: MergeableAttentionManager,
        sharing: ContextSharing,
        accounts: Accounts,
        pressure: Pressure,
        num_heads: int,
        bytes_per_block: int,
        engine: int,
        fail: Callable[[str, Exception], None],
    ) -> None:
        self._manager, self._sharing, self._accounts = manager, sharing, accounts
        self._pressure, self._bytes_per_block, self._engine, self._fail = pressure, bytes_per_block, engine, fail
        self._pace, self._turns = Pace(num_heads), count()

    def _states(self, running: Sequence[Request]) -> list[RequestState]:
        states = self._manager.states
        return [state for request in running if (state := states.get(request.request_id)) is not None]

    def drop(self, state: RequestState) -> None:
        """Drops the request's compression if it is under way."""
        if state.work is not None:
            self._sharing.drop(state.work.front)
            state.work = None

    def learn(self, report: CompressionReport) -> None:
        """Takes into account how far workers have come, and what fronts came to whose size depends on data."""
        self._pace.learn(report.spent)
        states = self._manager.states
        for request_id, front in report.fronts.items():
            if (state := states.get(request_id)) is not None:  # otherwise it has ended
                state.reported[front.num_tokens] = front
                self._count_freed(state, self._manager.shrink_front(state, front) + state.unreported)
                state.unreported = 0
        for request_id, progress in report.progress.items():
            if (state := states.get(request_id)) is not None and state.work is not None:
                state.work.learn(progress)

    # Compressions that are due.

    def compress_due(
        self,
        running: list[Request],
        scheduled: dict[str, int],
        step: CompressionStep,
        preempt: Callable[[Request], None],
    ) -> None:
        """Adds the compressions due after ``step``, and parts of one that is spread. scheduled: tokens of the step, by
        request. preempt: takes a request out of ``running``."""
        is_awaited = self._is_awaited(running, scheduled)
        room = self._pace.room(is_awaited)
        waiting, seconds = self._plan_due(running, step, is_awaited, room)
        while waiting and not (scheduled or step.compress or self._at_work(running)):
            # Deadlock: requests that share their blocks wait for room to copy them. One has to go.
            preempt(waiting[-1])
            waiting, seconds = self._plan_due(running, step, is_awaited, room)
        for state in self._at_work(running) if room else ():
            assert state.work is not None
            part = state.work.next_part(max(LEAST_SECONDS, room - seconds), self._pace) if is_awaited else None
            if part is None:
                self._complete(state, step)
            else:
                step.parts.append(part)
        step.is_awaited = is_awaited and bool(step.compress or step.parts)

    def _at_work(self, running: Sequence[Request]) -> list[RequestState]:
        """Those whose compression is spread over steps: one at a time."""
        return [state for state in self._states(running) if state.work is not None]

    def _is_awaited(self, running: Sequence[Request], scheduled: Mapping[str, int]) -> bool:
        """True if requests are computed in this step whose next tokens wait for compressions of others."""
        states = self._manager.states
        return any(
            request.request_id in scheduled
            and not isinstance(request, InternalRequest)
            and ((state := states.get(request.request_id)) is None or not state.is_due)
            for request in running
        )

    def _plan_due(
        self, running: Sequence[Request], step: CompressionStep, is_awaited: bool, room: float
    ) -> tuple[list[Request], float]:
        """Adds to ``step`` the compressions due after it; returns the requests that found no room for theirs, and the
        seconds of the others. is_awaited: other requests wait for their next tokens. room: seconds that there are for
        compressions; 0: none are added.

        A step takes as many as fit, less what one that is spread gets, and at least one; a refresh alone. If other
        requests wait, a longer one is spread. The others are deferred to the next steps, longest wait first; until then
        their requests compute nothing.
        """
        due, waiting, seconds = self._due(running, step), list[Request](), 0.0
        at_work = bool(self._at_work(running))
        for state in due if room else ():
            try:
                new_front, estimate = state.new_front(), self._pace.seconds(state.kind, state.num_entries)
            except PartError as error:
                self._fail(state.request.request_id, error)
                state.due_since = None
                continue
            is_spread = is_awaited and estimate > STEP_SECONDS and not state.ends_now
            if is_spread and at_work:
                continue  # one after the other: together, both would take as long as the longer one
            # A refresh has a step's time to itself: it moves the complete cache too, how fast is not known.
            is_alone = state.is_refresh or (step.compress and step.compress[0].is_refresh)
            left = room - seconds - (LEAST_SECONDS if at_work else 0.0)
            if step.compress and (is_alone or (not is_spread and estimate > left)):
                break
            if self._plan(state, new_front, step, is_spread):
                seconds += 0.0 if is_spread else estimate
                at_work = at_work or is_spread
            else:
                waiting.append(state.request)
        return waiting, seconds

    def _due(self, running: Sequence[Request], step: CompressionStep) -> list[RequestState]:
        """Those to be compressed now, longest wait first. Adds to ``step`` the queries that others need."""
        due = list[RequestState]()
        for state in self._states(running):
            if (window := state.window()) is not None and not state.awaits_pressure:
                step.score[state.request.request_id] = window
            if not (state.is_due and state.is_scored):
                state.due_since = None
                continue
            if state.due_since is None:
                state.due_since = next(self._turns)
            due.append(state)
        return sorted(due, key=lambda state: state.due_since or 0)

    # Compressions under pressure.

    def relieve_pressure(
        self, running: Sequence[Request], first_waiting: Request | None, step: CompressionStep
    ) -> None:
        """Adds to ``step`` the compressions that end a shortage of blocks: as many as fit into ``STEP_SECONDS``, and at
        least one."""
        asleep = [state for state in self._states(running) if state.awaits_pressure and state.work is None]
        if not asleep:
            return
        for state in asleep:
            if (window := state.window()) is not None:
                step.score[state.request.request_id] = window
        seconds = 0.0
        for relief in self._pressure.reliefs(running, first_waiting, asleep, self._fail):
            state = relief.state
            seconds += self._pace.seconds(state.kind, state.num_entries)
            if step.compress and seconds > STEP_SECONDS:
                break
            # Not spread: blocks are needed at once.
            if self._plan(state, relief.new_front, step, is_spread=False):
                RELIEFS.labels(state.policy, self._engine).inc()

    # One compression.

    def _plan(self, state: RequestState, new_front: FrontSize, step: CompressionStep, is_spread: bool) -> bool:
        """Adds the request's compression to ``step``; False if there is no room to copy shared blocks. is_spread: it
        begins with this step and is spread over the next ones."""
        request, schedule, segments = state.request, state.schedule, state.segments
        num_computed, kind, num_entries = request.num_computed_tokens, state.kind, state.num_entries
        is_refresh, num_tokens = state.is_refresh, schedule.covered(segments, num_computed)
        computed = self._manager.computed_blocks(state)
        self._accounts.note(request)
        turns_windows = schedule.config.positions == "cache"
        relocation = self._manager.relocate(state, num_tokens, new_front, num_computed, turns_windows)
        if relocation is None:
            return False
        purpose: Purpose = "refresh" if is_refresh else "growth"
        if schedule.is_in_context(segments):
            purpose = "part" if num_computed < schedule.context else "context"
        compress = Compress(
            request_id=request.request_id,
            compression=schedule.config.text,
            purpose=purpose,
            num_tokens=num_tokens,
            seq_len=num_computed,
            budget=schedule.budget,
            new_front=new_front.places,
            blocks=relocation.blocks,
            share_blocks=new_front.share_blocks,
            external_tokens=schedule.total if schedule.external_bytes else 0,
        )
        front = self._sharing.plan(state, relocation.blocks) if compress.is_of_context else None
        state.is_repeated, state.due_since = False, None
        # A prompt that is the context itself goes on in a chat's next one, which looks for exact blocks.
        is_superseding = front is not None and purpose == "context" and schedule.context < request.num_prompt_tokens
        state.work = SpreadCompression(
            compress,
            front,
            relocation.windows,
            before=segments,
            num_freed=relocation.num_freed,
            may_shrink=new_front.may_shrink,
            superseded=computed if is_superseding else [],
            kind=kind,
            num_entries=num_entries,
        )
        if not is_spread:
            self._complete(state, step)
        return True

    def _complete(self, state: RequestState, step: CompressionStep) -> None:
        """Adds a compression to ``step``, or the rest of it, if it has been under way."""
        assert state.work is not None
        work, state.work = state.work, None
        step.compress.append(work.compress)
        step.moves += work.moves
        if work.front is not None:
            step.fronts.append(work.front)
        self._manager.retire_read(state)
        self._manager.supersede(work.superseded)
        state.shrink_kept()
        COMPRESSIONS.labels(state.policy, self._engine).inc()
        if work.may_shrink:
            state.unreported = work.num_freed
        else:
            self._count_freed(state, work.num_freed)
        if work.compress.is_refresh:
            REFRESHES.labels(state.policy, self._engine).inc()

    def _count_freed(self, state: RequestState, num_blocks: int) -> None:
        # Where each head has a page that is not full, a compression may take a block more than it frees.
        num_blocks = max(0, num_blocks)
        BLOCKS_FREED.labels(state.policy, self._engine).inc(num_blocks)
        BYTES_FREED.labels(state.policy, self._engine).inc(num_blocks * self._bytes_per_block)
        self._accounts.note_returned(state.request.request_id, num_blocks)
