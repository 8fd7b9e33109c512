"""Contexts that are repeated before they are compressed, by internal requests."""

from collections.abc import Callable, Sequence

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_kvmerge.engine.internal_requests import RepeatingRequest
from vllm_kvmerge.engine.known_scores import KnownScores
from vllm_kvmerge.engine.messages import CompressionStep
from vllm_kvmerge.engine.prefix_keys import PrefixKeys
from vllm_kvmerge.engine.state import RequestState, RequestStates


class Repetitions:
    """Has contexts repeated, one chunk after the other, and what comes of it shared.

    keys: of contexts. max_bytes: of scores that workers keep; 0: none. queue: has an internal request scheduled. end:
    ends requests, by id.
    """

    def __init__(
        self,
        states: RequestStates,
        keys: PrefixKeys,
        max_bytes: int,
        queue: Callable[[RepeatingRequest], None],
        end: Callable[[list[str]], object],
    ) -> None:
        self._states, self._keys, self._queue, self._end = states, keys, queue, end
        self.known_scores = KnownScores(max_bytes)
        self.orphans: list[str] = []
        """Internal requests that nobody needs any more."""

    def running(self) -> list[RepeatingRequest]:
        """Internal requests at work."""
        return [state.repetition for state in self._states.values() if state.repetition is not None]

    def stop(self, state: RequestState) -> None:
        """Of a request that ends, or starts anew."""
        # vLLM may be going through the queues just now, so the internal request ends a little later.
        if state.repetition is not None:
            self.orphans.append(state.repetition.request_id)
        state.repetition, state.is_repeated = None, False

    def end_orphans(self) -> None:
        if self.orphans:
            orphans, self.orphans = self.orphans, []
            self._end(orphans)

    def go_on(self, running: Sequence[Request], output: SchedulerOutput, step: CompressionStep) -> list[Request]:
        """Has contexts that have been computed repeated, before they are compressed.

        Adds to ``step`` the chunks that it repeats. Returns the requests whose internal ones found no room in it, and
        those that wait for scores of others.
        """
        stuck = []
        for request in running:
            state = self._states.get(request.request_id)
            if state is None or state.is_scored or not state.is_due:
                continue
            internal = state.repetition
            if internal is None:
                if not self._begin(state, step):
                    stuck.append(request)
            elif internal.request_id not in output.num_scheduled_tokens:
                if not internal.num_in_flight_tokens and not output.preempted_req_ids:
                    stuck.append(request)
            else:
                step.repeat[internal.request_id] = internal.chunk
                if internal.is_scheduled:
                    self._finish_chunk(state, internal, step)
        return stuck

    def _begin(self, state: RequestState, step: CompressionStep) -> bool:
        """Recalls the scores of a request's context that has been computed, or has it repeated; False if another
        request has the same context repeated just now, for which this one waits."""
        request, tracker = state.request, state.schedule.config.policy.tracker
        purpose = "repetition", tracker.name, tracker.model_dump_json()
        key = self._keys.of(request, state.schedule.context, *purpose)
        if key is not None and not request.skip_reading_prefix_cache:
            number = self.known_scores.find(key)
            if number is not None:
                step.scores.recalled[request.request_id] = number
                state.is_repeated = True
                return True
            if self.known_scores.has_room(state.schedule.score_bytes) and any(one.key == key for one in self.running()):
                return False
        self._repeat(state, key, 0)
        return True

    def _finish_chunk(self, state: RequestState, internal: RepeatingRequest, step: CompressionStep) -> None:
        # Its blocks are free for what this step's compressions write, after its forward pass.
        self._end([internal.request_id])
        self._repeat(state, internal.key, internal.index + 1)
        if state.is_repeated and internal.key is not None:
            number = self.known_scores.keep(internal.key, state.schedule.score_bytes)
            if number is not None:
                step.scores.kept[state.request.request_id] = number

    def _repeat(self, state: RequestState, key: bytes | None, index: int) -> None:
        """Queues the internal request that repeats a chunk of the request's context, if there is such a chunk."""
        schedule = state.schedule
        internal = RepeatingRequest.of(state.request, schedule.config.policy.tracker, key, schedule.context, index)
        state.repetition, state.is_repeated = internal, internal is None
        if internal is not None:
            self._queue(internal)
