"""A worker's compressed requests: what is known of each, and its row in a batch for attention."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.attention.compressed import read_verified
from vllm_kvmerge.engine.attention.rows import (
    PLAIN,
    BatchRow,
    HeldQueries,
    LookaheadWindow,
    Normalization,
    PredictedScores,
    PromptScores,
    QueryRing,
    RepetitionWindow,
    ScoreWindow,
)
from vllm_kvmerge.engine.messages import Adopt, CompressionStep, Repeat, attached_step, is_scheduled
from vllm_kvmerge.engine.worker.arriving import Arriving
from vllm_kvmerge.engine.worker.cache import CompressedCache
from vllm_kvmerge.engine.worker.compaction import Batch
from vllm_kvmerge.engine.worker.external import ExternalCache
from vllm_kvmerge.engine.worker.head_pages import moved
from vllm_kvmerge.engine.worker.reporting import EntryCounts, Reporter
from vllm_kvmerge.engine.worker.verification import score_tokens
from vllm_kvmerge.ops import NO_UPDATE, HeadPages, ScoreMode, ScoreUpdate
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies.errors import PartError
from vllm_kvmerge.policies.trackers import LookaheadTracker
from vllm_kvmerge.request.spec import CompressionSpec


@dataclass
class RequestState:
    """A worker's state of a request with a policy. update: of its scores by attention after the first compression, if
    its policy tracks them. prompt_scores: until the first compression. ring: its newest queries. complete: its complete
    cache, from the first compression on, if it is refreshed. predicts: scores of generated tokens are predicted. pages:
    of its heads, one row per layer, where the front is not an ordinary one. table: of these pages, on a GPU.
    budget_data: ``Execution.budget_data`` of its last compression. output: of its context's last token, until its front
    is shared. shift: what RoPE adds to the positions of its tokens, so that those of its tail follow its front."""

    front: int = 0
    tail: int = 0
    update: ScoreUpdate = NO_UPDATE
    prompt_scores: PromptScores | None = None
    ring: QueryRing | None = None
    complete: ExternalCache | None = None
    predicts: bool = False
    pages: HeadPages | None = None
    table: Tensor | None = None
    budget_data: Arriving | None = None
    output: Tensor | None = None
    shift: int = 0


@dataclass(frozen=True)
class KeptFront:
    """What a worker keeps of a front in the prefix cache besides its blocks. pages, table, budget_data: as in
    ``RequestState``. queries: the newest ones of the context, if its policy goes on reading them. output: the hidden
    state that the model made of the context's last token, ``[hidden]``."""

    pages: HeadPages | None
    table: Tensor | None
    budget_data: Arriving | None
    queries: Tensor | None
    output: Tensor | None


def score_update(config: CompressionSpec) -> ScoreUpdate:
    tracker = config.policy.tracker
    return ScoreUpdate(ScoreMode(tracker.mode), tracker.update_decay)


def position_shift(config: CompressionSpec, state: RequestState) -> int:
    """``RequestState.shift`` for its front and tail."""
    return state.front - state.tail if config.positions == "cache" else 0


class CompressedRows(CompressedCache):
    """The requests' states, and their rows in the batch of a step."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.states: dict[str, RequestState] = {}
        self.step = CompressionStep()
        self._fronts: dict[bytes, KeptFront] = {}
        self._shifts: Tensor | None = None
        """What RoPE adds to the positions of the batch's tokens; None: nothing."""
        self._begun: dict[str, tuple[Batch, PartError | None]] = {}
        """Compressions under way, and why they cannot be carried out as they should, if that is known."""
        self._last_tokens: dict[str, int] = {}
        """Places in the batch of outputs that are kept or replaced, by request."""
        self._verified_tokens: dict[str, int] = {}
        """Places in the batch of the first tokens whose outputs are scored, by request."""
        self._with_drafts: frozenset[str] = frozenset()
        """Requests of whose tokens in the step some are drafts."""
        self._held: dict[str, tuple[int, HeldQueries]] = {}
        """Their queries, if they count, and the numbers of tokens computed before the step."""
        self._engine = vllm_config.parallel_config.data_parallel_index
        self._counts = EntryCounts(self._engine)
        self.reporter = Reporter()

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """Begins a step: forgets requests that have ended or start anew."""
        self._counts.flush()
        self.step = attached_step(scheduler_output)
        self.reporter.is_heard = is_scheduled(scheduler_output)
        self._with_drafts = frozenset(scheduler_output.scheduled_spec_decode_tokens)
        if self.step.poison:
            self._poison(self.step.poison)
        for turn in self.step.turns:
            ended = self.states[turn.request_id]
            queries = ended.ring.queries(turn.num_tokens) if turn.keeps_queries and ended.ring is not None else None
            self._fronts[turn.key] = KeptFront(ended.pages, ended.table, ended.budget_data, queries, None)
        for request_id in (
            scheduler_output.finished_req_ids
            | (scheduler_output.preempted_req_ids or set())
            | scheduler_output.scheduled_cached_reqs.resumed_req_ids
        ):
            self._begun.pop(request_id, None)
            self.states.pop(request_id, None)
        if self.step.adopt:
            copied = [one for one in self.step.adopt.values() if one.blocks]
            self.copy([id_ for one in copied for id_ in one.sources], [id_ for one in copied for id_ in one.blocks])
            for request_id, adoption in self.step.adopt.items():
                self.states[request_id] = self._adopted(adoption)
        # Last: a request may begin with a front and, when its next compression takes the blocks, end it in one step.
        for key in self.step.drop:
            self._fronts.pop(key, None)

    def _adopted(self, adoption: Adopt) -> RequestState:
        """The state of a request that begins with a front."""
        config, front = CompressionSpec.of(adoption.compression), self._fronts[adoption.key]
        state = RequestState(
            adoption.front, adoption.tail, pages=front.pages, table=front.table, budget_data=front.budget_data
        )
        state.shift = position_shift(config, state)
        self._track(state, config, adoption.is_partial)
        if front.pages is not None and adoption.blocks:
            state.pages = moved(front.pages, adoption.sources, adoption.blocks)
            state.table = self._table(state.pages)
        if front.queries is not None and adoption.query_window:
            state.ring = self._ring(adoption.query_window)
            state.ring.fill(front.queries, adoption.num_tokens)
        return state

    def _new_state(self, config: CompressionSpec, num_computed: int, seq_len: int, query_window: int) -> RequestState:
        """A state with room for the prompt scores and queries, from position ``num_computed`` on, that the policy
        needs."""
        state, layers = RequestState(), self.compactor.layers
        if config.policy.scores_tokens and not config.awaits_pressure:
            state.prompt_scores = PromptScores.empty(len(layers), layers[0].num_kv_heads, seq_len, self._device)
        if query_window:
            state.ring = self._ring(query_window)
            state.ring.start = num_computed
        return state

    def _track(self, state: RequestState, config: CompressionSpec, is_partial: bool = False) -> None:
        """Has attention go on with a compressed request's scores as its policy asks (``CompressionSpec.tracks``)."""
        tracks = config.tracks(is_partial)
        state.update = score_update(config) if tracks else NO_UPDATE
        state.predicts = tracks and config.policy.tracker.predicts_scores
        if config.policy.tracker.reads_ahead:  # its queries have scored the context
            state.ring = None

    def rows(self, order: Iterable[tuple[str, int, int]]) -> list[BatchRow]:
        """The batch's rows, none if no request has a policy. order: requests, with tokens scheduled and computed."""
        rows, batch = list[BatchRow](), list[tuple[str, int, int]]()
        self._last_tokens, self._verified_tokens, self._shifts, self._held = {}, {}, None, {}
        if self.states or self.step.score or self.step.repeat or self.step.outputs or self.step.verify:
            batch = list(order)
            rows = [self.row(*request) for request in batch]
            self._watch_outputs(batch)
            if any(shifts := [row.shift for row in rows]):
                lengths = torch.tensor([num_scheduled for _, num_scheduled, _ in batch])
                self._shifts = sent(torch.tensor(shifts).repeat_interleave(lengths), self._device)
        if self._hidden_states is not None:
            self._hidden_states.observe(any(row.needs_hidden_states for row in rows))
        return [self._holding(*request, row) for request, row in zip(batch, rows, strict=True)]

    def row(self, request_id: str, num_scheduled: int, num_computed: int) -> BatchRow:
        """The batch row of a request with ``num_scheduled`` new tokens after ``num_computed``."""
        state = self.states.get(request_id)
        if state is not None and state.front > 0:
            adoption = self.step.adopt.get(request_id)
            if adoption is not None and adoption.restores_output:
                # Nothing comes of this token, whose query the front has seen before; attention wants one after it.
                return BatchRow(state.front, state.tail - 1, pages=state.pages, table=state.table)
            predicted = PredictedScores(self._seen, None) if state.predicts else None
            return BatchRow(
                state.front,
                state.tail,
                state.update,
                predicted,
                state.ring,
                pages=state.pages,
                table=state.table,
                shift=state.shift,
            )
        window, seq_len = self.step.score.get(request_id), num_computed + num_scheduled
        if (chunk := self.step.repeat.get(request_id)) is not None:
            return self._repeating_row(chunk, num_scheduled, seq_len)
        if window is None or window.start >= seq_len:
            return PLAIN
        config = CompressionSpec.of(window.compression)
        if state is None:
            state = self.states[request_id] = self._new_state(config, num_computed, seq_len, window.query_window)
        if state.prompt_scores is None:
            return BatchRow(ring=state.ring)
        state.prompt_scores.grow(seq_len)
        if config.policy.tracker.predicts_scores:
            return BatchRow(window=PredictedScores(self._seen, state.prompt_scores), ring=state.ring)
        if isinstance(tracker := config.policy.tracker, LookaheadTracker):
            assert window.end is not None and state.ring is not None and self.compactor.rotation is not None
            ahead = window.end, tracker, state.ring, self.compactor.rotation, state.prompt_scores
            return BatchRow(window=LookaheadWindow(*ahead))
        num_queries = min(num_scheduled, seq_len - window.start)
        return BatchRow(window=ScoreWindow(num_queries, score_update(config), state.prompt_scores), ring=state.ring)

    def _repeating_row(self, chunk: Repeat, num_scheduled: int, seq_len: int) -> BatchRow:
        """The row of an internal request that repeats a chunk of another one's context."""
        if seq_len <= chunk.context:
            return PLAIN
        state, layers = self.states.setdefault(chunk.parent, RequestState()), self.compactor.layers
        if state.prompt_scores is None:
            shape = len(layers), layers[0].num_kv_heads, chunk.context
            state.prompt_scores = PromptScores.empty(*shape, self._device)
        num_queries = min(num_scheduled, seq_len - chunk.context)
        where = chunk.context, chunk.start, chunk.end, chunk.sinks
        normalization = None
        if chunk.normalizes:
            assert self._output_weights is not None
            normalization = Normalization(self._seen, self._output_weights.norms)
        return BatchRow(window=RepetitionWindow(num_queries, *where, state.prompt_scores, normalization))

    def _holding(self, request_id: str, num_scheduled: int, num_computed: int, row: BatchRow) -> BatchRow:
        """The row, but with its queries held back if some of its tokens are drafts, until ``count_verified``."""
        if request_id not in self._with_drafts or not row.counts_queries:
            return row
        held = HeldQueries()
        self._held[request_id] = num_computed, held
        return replace(row, update=NO_UPDATE, window=None, ring=None, held=held)

    @property
    def holds_queries(self) -> bool:
        """True if queries are held back until ``count_verified``."""
        return bool(self._held)

    def count_verified(self, num_tokens: Mapping[str, int]) -> None:
        """Has queries count that were held back: those of tokens that turned out to be right, and of no others.

        num_tokens: of the step's requests, how many of their tokens these are. They are the first ones.
        """
        held, self._held = self._held, {}
        verified = []
        for request_id, (num_computed, queries) in held.items():
            count = num_tokens[request_id]
            verified.append((queries, queries.reader(self.row(request_id, count, num_computed), count)))
        read_verified(verified, self.compactor.layers, self.compactor.scale, self.compactor.softmax)

    def shift_positions(self, positions: Tensor) -> None:
        """Has RoPE count the entries of the cache where requests ask for that. positions: the model's, ``[tokens]``
        int64, in place, after everything else that depends on the tokens' own has read them."""
        if self._shifts is not None:
            positions[: len(self._shifts)] += self._shifts

    def unshift_positions(self, positions: Tensor) -> None:
        """Undoes ``shift_positions``."""
        if self._shifts is not None:
            positions[: len(self._shifts)] -= self._shifts

    def _watch_outputs(self, batch: list[tuple[str, int, int]]) -> None:
        """Notes where in the batch outputs are that are kept, replaced or scored."""
        restored = (request_id for request_id, one in self.step.adopt.items() if one.restores_output)
        watched, verify = {*self.step.outputs, *restored}, self.step.verify
        if not watched and not verify:
            return
        ends = dict(zip((one[0] for one in batch), accumulate(one[1] for one in batch), strict=True))
        self._last_tokens = {request_id: ends[request_id] - 1 for request_id in watched & ends.keys()}
        self._verified_tokens = {
            request_id: ends[request_id] - num_scheduled + verify[request_id].offset
            for request_id, num_scheduled, _ in batch
            if request_id in verify
        }

    def exchange_outputs(self, hidden_states: Tensor) -> None:
        """Keeps the outputs of last tokens of contexts whose fronts others may begin with, puts them in the place of
        what such a front's last token has come to since, and scores those of answers that are verified. hidden_states:
        the model's, ``[tokens, hidden]``."""
        scored, self._verified_tokens = self._verified_tokens, {}
        for request_id, place in scored.items():
            one = self.step.verify[request_id]
            states, dtype = hidden_states[place : place + one.count], self._config.model_config.dtype
            compute_logits = compat.logits_under(self._model, one.adapter)
            if (scores := score_tokens(states, one, compute_logits, dtype)) is not None:
                self.reporter.add_scores(request_id, one.first, scores)
        places, self._last_tokens = self._last_tokens, {}
        for request_id, place in places.items():
            adoption = self.step.adopt.get(request_id)
            if adoption is not None and adoption.restores_output:
                output = self._fronts[adoption.key].output
                assert output is not None
                hidden_states[place] = output
            else:
                self.states.setdefault(request_id, RequestState()).output = hidden_states[place].clone()

    def needs_python(self, order: Iterable[tuple[str, int, int]]) -> bool:
        """True if Python code must see this step's queries, which rules out a captured graph."""
        return any(row.needs_python for row in self.rows(order))
