"""A worker without a model: it notes what each slot of the cache would hold, and checks whatever attention, and
compactions, would read.

Contents are numbers. That of a token's slot is a hash of all that the token depends on: the tokens before it, and what
its request has been compressed to; that of an entry of a front is a hash of what the front was made of, and of the
entry's place. So two slots hold the same number only where a model would have written the same to both.

The order of events is that of ``Compression`` and of vLLM's model runner V1.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any
from zlib import crc32

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.engine.machine.setting import BLOCK_SIZE, MAX_MODEL_LEN, WINDOW
from vllm_kvmerge.engine.messages import (
    Compress,
    CompressionReport,
    CompressionStep,
    CompressPart,
    Failure,
    FrontReport,
    MoveWindow,
    Spent,
    TokenScores,
    attach,
    attached_step,
)
from vllm_kvmerge.request.spec import CompressionSpec, parse_compression

NUM_TOKEN_IDS = 40
STEP_SECONDS = 0.02
"""That a step takes without compressions."""

_SEED = np.random.default_rng(0)
ENTRIES = _SEED.integers(1, 1 << 62, MAX_MODEL_LEN * 2, dtype=np.int64)
"""What tells a front's entries apart, by place."""
GROUPS = [0, int(_SEED.integers(1, 1 << 62))]
"""What tells the same token in two groups of layers apart: a block's memory is one group's at a time."""


def text_id(text: str) -> int:
    """The same in all processes, unlike ``hash``."""
    return crc32(text.encode())


def root(salt: str | None, epoch: int) -> int:
    """What a request's first token depends on. epoch: of the model's weights."""
    return hash((text_id(salt or ""), epoch))


@dataclass
class Begun:
    """A compression under way. filling: what its new blocks hold until its last part, by slot. until: share of it that
    has been done."""

    plan: Compress
    targets: list[int]
    filling: int
    until: float = 0.0


@dataclass
class Sequence:
    """A request as the worker knows it.

    blocks: by group of layers. computed: tokens in the cache. values: what the slots of its tokens hold, by
    position; in_windows: the same of layers with a window, whose keys may be turned. state: what its next token
    depends on. front: slots of its front. front_id: what those are. places: of the plan that made it. scored:
    first and end of the tokens whose queries have been scored; kept: first of those whose queries are kept. repeated:
    parts of its context whose repetition has been scored. complete: tokens in its complete cache. tracks: attention
    writes scores into its front. has_failed: its last compression has. course: tokens at which it was compressed.

    Of a front in the prefix cache it says what its blocks must hold. policy: all that it depends on beside its tokens
    and salt. keeps_queries: with it.
    """

    tokens: list[int]
    blocks: list[list[int]]
    salt: str | None = None
    computed: int = 0
    values: np.ndarray = field(default_factory=lambda: np.zeros(MAX_MODEL_LEN + 1, np.int64))
    in_windows: np.ndarray = field(default_factory=lambda: np.zeros(MAX_MODEL_LEN + 1, np.int64))
    state: int = 0
    front: int = 0
    front_id: int = 0
    places: int = 0
    tail: int = 0
    changed_at: int = 0
    scored: tuple[int, int] | None = None
    kept: int | None = None
    repeated: list[tuple[int, int]] = field(default_factory=list)
    recalled: bool = False
    complete: int = 0
    begun: Begun | None = None
    is_adopted: bool = False
    tracks: bool = False
    has_failed: bool = False
    course: list[tuple[int, ...]] = field(default_factory=list)
    policy: str = ""
    keeps_queries: bool = False

    @property
    def is_compressed(self) -> bool:
        return self.front > 0

    def compute(self, start: int, end: int) -> None:
        """Notes what tokens ``[start, end)`` come to."""
        for position in range(start, end):
            self.state = hash((self.state, self.tokens[position]))
            self.values[position] = self.in_windows[position] = self.state

    def keep(self, num_tokens: int, policy: str, keeps_queries: bool, **changes: Any) -> "Sequence":
        """A copy, for the prefix cache."""
        changes |= {"values": self.values.copy(), "in_windows": self.in_windows.copy()}
        return replace(self, tokens=self.tokens[:num_tokens], policy=policy, keeps_queries=keeps_queries, **changes)

    def held(self) -> np.ndarray:
        """What its live slots hold in the compressed group, in the order of ``slots``."""
        return np.concatenate([ENTRIES[: self.front] + np.int64(self.front_id), self.values[self.tail : self.computed]])

    def slots(self) -> np.ndarray:
        return np.concatenate([np.arange(self.front), np.arange(self.tail, self.computed)])


@dataclass(frozen=True)
class Asked:
    """What a user's request asks for. policy: all that its context's front depends on. context: tokens of it. tracker:
    all that its scores depend on."""

    salt: str | None = None
    policy: str = ""
    context: int = 0
    tracker: str = ""


class Worker:
    """num_groups: of layers. head_pages: heads may have pages of their own. holders: of a block: how many there are,
    how many of them are fronts with it in a window, and whether a cached front lies in it. events: how often things
    have happened."""

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        head_pages: bool,
        holders: Callable[[int], tuple[int, int, bool]],
        events: Counter[str],
    ) -> None:
        self.content = np.zeros((num_blocks, BLOCK_SIZE), np.int64)
        self.unclean = np.zeros((num_blocks, BLOCK_SIZE), bool)
        """Slots that hold what a compressed request wrote."""
        self.sequences: dict[str, Sequence] = {}
        self.fronts: dict[bytes, Sequence] = {}
        self.known_scores: dict[int, int] = {}
        self.epoch = 0
        self.asked: dict[str, Asked] = {}
        """By user's request."""
        self.courses: dict[str, list[tuple[int, ...]]] = {}
        """Compressions of the longest run of each request, whatever else ran."""
        self.in_flight: set[bytes] = set()
        """Keys of fronts made in steps whose outputs the scheduler has not seen."""
        self.to_fail = 0
        """How many of the next compressions fail."""
        self.now = 0.0
        self.seconds_per_entry = 3e-3
        """Of compressions."""
        self.events = events
        self._num_groups, self._head_pages, self._holders = num_groups, head_pages, holders
        self._needed: dict[int, int] = {}
        """Blocks that fronts turned out to need, by what they were made of."""
        self._admitted: set[str] = set()
        """Requests that begin, or begin anew, with this step."""
        self._report, self._step = CompressionReport(), CompressionStep()

    # A step.

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        step, scheduled = attached_step(output), output.num_scheduled_tokens
        self._report, self._step = CompressionReport(), step
        self.now += STEP_SECONDS
        adopted = self._begin(output, step)
        if output.new_block_ids_to_zero:
            self.content[output.new_block_ids_to_zero] = 0
            self.unclean[output.new_block_ids_to_zero] = False
        if copies := output.kv_cache_block_copies:  # of a block of a window that a hit ends within
            self.events["blocks of windows copied"] += 1
            unclean = self.unclean[[one.src_block_id for one in copies]]
            targets = [one.dst_block_id for one in copies]
            self._copy([one.src_block_id for one in copies], targets)
            self.unclean[targets] = unclean
        before = self._update(output, step, adopted)
        self._write_tokens(scheduled, before, step)
        for adoption in step.adopt.values():
            self._copy(adoption.exact, adoption.restored)
            self.unclean[adoption.restored] = False
        for name in scheduled:
            # Nothing comes of a repetition whose parent has just been preempted: it has ended by now.
            if "/" not in name or name in step.repeat or name in step.verify:
                self.check_readable(name)
                self._check_clean_behind(name)
        self._score(scheduled, before, step)
        self._verify(before, step)
        self._run_plans(step)
        sampled = [self._sample(name) for name in scheduled]
        names = list(scheduled)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled if names else [],
        )
        attach(result, self._report)
        return result

    def _begin(self, output: SchedulerOutput, step: CompressionStep) -> dict[str, Sequence]:
        """As ``Compression.begin``: keeps turns, forgets requests, and copies fronts. Returns those taken over."""
        for turn in step.turns:
            name, end = turn.request_id, turn.num_tokens
            sequence = self.sequences[name]
            assert sequence.tail <= end <= sequence.computed, f"the turn of {name} is not what it holds"
            kept = sequence.keep(end, self.asked[name].policy, turn.keeps_queries, computed=end)
            kept.state = int(sequence.values[end - 1]) if end > sequence.tail else sequence.front_id
            self.fronts[turn.key] = kept
            self.events["turns kept"] += 1
        preempted = (output.preempted_req_ids or set()) | output.scheduled_cached_reqs.resumed_req_ids
        for name in preempted | output.finished_req_ids:
            self.sequences.pop(name, None)
        sources = [block for one in step.adopt.values() if one.blocks for block in one.sources]
        targets = [block for one in step.adopt.values() if one.blocks for block in one.blocks]
        self._copy(sources, targets)
        for name, adoption in step.adopt.items():
            assert adoption.key in self.fronts, f"{name} begins with a front that the worker does not know"
        adopted = {name: self.fronts[adoption.key] for name, adoption in step.adopt.items()}
        for key in step.drop:
            self.fronts.pop(key, None)
        return adopted

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        assert len(set(targets)) == len(targets), f"blocks are copied to twice in one step: {targets}"
        assert not set(sources) & set(targets), f"blocks are copied from and to in one step: {sources} {targets}"
        self._check_sole(targets, "is copied to")
        self.content[targets] = self.content[sources]
        self.unclean[targets] = True

    def _finders(self, name: str, group: int) -> Counter[int]:
        """How many requests have just found each block in the prefix cache, where others are about to write it: what
        a step computes is there before it is read."""
        others = self._admitted - {name}
        return Counter(block for other in others for block in self.sequences[other].blocks[group])

    def _check_sole(
        self,
        blocks: Iterable[int],
        what: str,
        finders: Mapping[int, int] = MappingProxyType({}),
        may_follow_front: bool = False,
    ) -> None:
        """may_follow_front: whoever made a front goes on in its window's last block, behind what the front holds there
        (``check_front``)."""
        for block in blocks:
            assert block != 0, f"the null block {what}"
            num_holders, num_fronts, is_of_front = self._holders(block)
            num_holders -= num_fronts if may_follow_front else 0
            assert num_holders - finders.get(block, 0) <= 1, f"block {block} {what} while it is shared"
            assert may_follow_front or not is_of_front, f"block {block} of a front in the prefix cache {what}"

    def _update(self, output: SchedulerOutput, step: CompressionStep, adopted: dict[str, Sequence]) -> dict[str, int]:
        """As the runner's ``_update_states``. Returns the tokens that each scheduled request had computed before."""
        before = dict[str, int]()
        self._admitted = set()

        def admit(name: str, tokens: list[int], blocks: tuple[list[int], ...], num_computed: int) -> None:
            self._admitted.add(name)
            salt = self.asked[name.partition("/")[0]].salt
            self.sequences[name] = Sequence(
                list(tokens), [list(ids) for ids in blocks], salt, state=root(salt, self.epoch)
            )
            self._begin_with(name, num_computed, adopted.get(name), step)

        for new in output.scheduled_new_reqs:
            before[new.req_id] = new.num_computed_tokens
            admit(new.req_id, new.prompt_token_ids, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, num_computed, new_blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            before[name], tokens = num_computed, cached.all_token_ids.get(name)
            if name in cached.resumed_req_ids:
                admit(name, tokens, new_blocks, num_computed)
                continue
            sequence = self.sequences[name]
            assert tokens is None or sequence.tokens[: len(tokens)] == list(tokens), f"the tokens of {name} are others"
            for blocks, ids in zip(sequence.blocks, new_blocks or ([],) * self._num_groups, strict=True):
                blocks.extend(ids)
            assert num_computed == sequence.computed, f"{name} does not go on where it was"
        return before

    def _begin_with(self, name: str, num_computed: int, kept: Sequence | None, step: CompressionStep) -> None:
        """Begins a request anew with what it found in the prefix cache, or with a front."""
        sequence, asked = self.sequences[name], self.asked[name.partition("/")[0]]
        if kept is None:
            sequence.compute(0, num_computed)
            sequence.computed = num_computed
            if num_computed:
                self.events["prefix-cache hits"] += 1
            return
        adoption = step.adopt[name]
        self.events["fronts adopted"] += 1
        begins_with = sequence.tokens[: adoption.num_tokens], asked.salt, asked.policy
        assert begins_with == (kept.tokens, kept.salt, kept.policy), f"{name} begins with another front"
        told = adoption.front, adoption.tail, adoption.num_tokens
        assert told == (kept.places, kept.tail, len(kept.tokens)), f"{name} takes its front for another"
        sequence.state, sequence.front, sequence.front_id = kept.state, kept.front, kept.front_id
        sequence.places, sequence.tail, sequence.changed_at = kept.places, kept.tail, kept.changed_at
        sequence.values[:], sequence.in_windows[:] = kept.values, kept.in_windows
        sequence.computed, sequence.is_adopted = num_computed, True
        sequence.tracks = parse_compression(adoption.compression).tracks(adoption.is_partial)
        sequence.kept = 0 if kept.keeps_queries else None
        again = adoption.restores_output  # its last token is computed again
        assert num_computed == adoption.num_tokens - again, f"{name} has {num_computed} tokens of its front"
        self.events["outputs restored"] += again

    def _write_tokens(self, scheduled: dict[str, int], before: dict[str, int], step: CompressionStep) -> None:
        written: set[tuple[int, int]] = set()
        for name, num_new in scheduled.items():
            sequence, start = self.sequences[name], before[name]
            end = start + num_new
            assert sequence.begun is None, f"{name} is computed while it is compressed"
            assert end <= len(sequence.tokens), f"{name} computes tokens that it does not have"
            adoption = step.adopt.get(name)
            is_restored = adoption is not None and adoption.restores_output
            if is_restored:
                # Nothing comes of this token, and nobody reads its slot.
                values = np.array([hash((sequence.state, start))])
            else:
                sequence.compute(start, end)
                values = sequence.values[start:end]
            sequence.computed = end
            if sequence.tracks and not is_restored:
                front = sequence.blocks[0][: -(-sequence.front // BLOCK_SIZE)]
                self._check_sole(front, f"gets scores of {name}")
            offsets = np.arange(start, end)
            for group, blocks in enumerate(sequence.blocks):
                ids = np.array(blocks[: -(-end // BLOCK_SIZE)])
                assert len(ids) * BLOCK_SIZE >= end, f"{name} has no block for its new tokens"
                ids = ids[offsets // BLOCK_SIZE]
                self._check_sole(set(ids.tolist()), f"is written to by {name}", self._finders(name, group), group > 0)
                slots = list(zip(ids.tolist(), (offsets % BLOCK_SIZE).tolist(), strict=True))
                assert not written.intersection(slots), f"{name} writes to slots of another request"
                written.update(slots)
                self.content[ids, offsets % BLOCK_SIZE] = values ^ GROUPS[group]
                self.unclean[ids, offsets % BLOCK_SIZE] = sequence.is_compressed and group == 0

    def check_readable(self, name: str) -> None:
        """Checks that each slot that attention reads for the request holds what it should."""
        sequence = self.sequences[name]
        self._check_holds(sequence, sequence.blocks[0], name)
        for group, blocks in enumerate(sequence.blocks[1:], 1):
            # What the next token's query will see.
            positions = np.arange(max(0, sequence.computed - WINDOW + 1), sequence.computed)
            self._check_window(sequence, group, np.array(blocks), positions, name)

    def _check_window(
        self, sequence: Sequence, group: int, blocks: np.ndarray, positions: np.ndarray, name: object
    ) -> None:
        """blocks: of the group, by row."""
        ids = blocks[positions // BLOCK_SIZE]
        assert (ids != 0).all(), f"{name} reads the null block within its window"
        held = self.content[ids, positions % BLOCK_SIZE] ^ GROUPS[group]
        wrong = np.flatnonzero(held != sequence.in_windows[positions])
        assert not len(wrong), f"{name} reads what is not its own within its window, at {positions[wrong]}"

    def _check_holds(self, sequence: Sequence, blocks: list[int], name: object) -> None:
        slots = sequence.slots()
        ids = np.array(blocks, np.int64)[slots // BLOCK_SIZE]
        assert (ids != 0).all(), f"{name} reads the null block"
        wrong = np.flatnonzero(self.content[ids, slots % BLOCK_SIZE] != sequence.held())
        assert not len(wrong), f"{name} reads what is not its own in slots {slots[wrong]} of blocks {blocks}"

    def check_front(
        self, key: bytes, rows: Iterable[int], blocks: Iterable[int], windows: Mapping[int, tuple[int, list[int]]]
    ) -> None:
        """Checks that the blocks of a front in the prefix cache hold it. windows: first rows and blocks, by group."""
        kept = self.fronts.get(key)
        assert kept is not None, "the worker does not know a front in the prefix cache"
        assert key not in self.in_flight, "a front is offered before it has been computed"
        assert not kept.has_failed, "a front is offered whose compression has failed"
        table = dict(zip(rows, blocks, strict=True))
        row = [table.get(index, 0) for index in range(max(table) + 1)]
        what = f"a front of {len(kept.tokens)} tokens"
        self._check_holds(kept, row, what)
        for group, (first_row, ids) in windows.items():
            positions = np.arange(first_row * BLOCK_SIZE, kept.computed)
            self._check_window(kept, group, np.array([0] * first_row + ids), positions, what)

    def _check_clean_behind(self, name: str) -> None:
        """Checks that what vLLM's operators load behind a sequence's end cannot be NaN."""
        sequence = self.sequences[name]
        end = sequence.computed
        if end % BLOCK_SIZE == 0:
            return
        for group, blocks in enumerate(sequence.blocks):
            if group == 0 and sequence.is_compressed:
                continue  # our operator stops at the end
            behind = self.unclean[blocks[end // BLOCK_SIZE], end % BLOCK_SIZE :]
            assert not behind.any(), f"behind {name} lies what a compressed request wrote"

    # Scores of queries.

    def _score(self, scheduled: dict[str, int], before: dict[str, int], step: CompressionStep) -> None:
        for name in scheduled:
            sequence, start = self.sequences[name], before[name]
            if (chunk := step.repeat.get(name)) is not None:
                parent = self.sequences[chunk.parent]
                if sequence.computed == len(sequence.tokens):
                    # The first tokens are not repeated: all chunks attend to them.
                    parent.repeated.append((0 if chunk.start <= chunk.sinks else chunk.start, chunk.end))
                    self.events["chunks repeated"] += 1
                continue
            window = step.score.get(name)
            if window is None or sequence.is_compressed or window.start >= sequence.computed:
                continue
            if sequence.kept is None:
                sequence.kept = start
            first, end = sequence.scored or (max(start, window.start), start)
            # A gap ends what has been scored.
            sequence.scored = (first if end in (start, first) or sequence.scored is None else start), sequence.computed

    def _verify(self, before: dict[str, int], step: CompressionStep) -> None:
        for name, one in step.verify.items():
            sequence = self.sequences[name]
            start = before[name] + one.offset
            assert not sequence.is_compressed and start + 1 == one.num_prompt_tokens + one.first
            assert start + one.count <= sequence.computed and one.tokens[:-1] == sequence.tokens
            self._report.verified[name] = TokenScores(one.first, [-1.0] * one.count, [True] * one.count)

    def _check_scored(self, plan: Compress, sequence: Sequence, config: CompressionSpec) -> None:
        """Checks that the queries that a first compression needs have been scored, or kept."""
        name, end, tracker = plan.request_id, plan.num_tokens, config.policy.tracker
        if tracker.repeats_context:
            is_whole = _covered(sequence.repeated) >= end
            assert sequence.recalled or is_whole, f"the context of {name} has not been repeated"
            return
        if config.awaits_pressure or tracker.predicts_scores:
            return
        window = config.prompt_window
        first = 0 if window == "all" else max(0, end - window)
        if window:
            start, stop = sequence.scored or (end, 0)
            assert start <= first and stop == end, f"{name} lacks scores of queries"
        if config.query_window:
            first = max(0, end - config.query_window)
            assert sequence.kept is not None and sequence.kept <= first, f"{name} lacks its newest queries"

    def _share_scores(self, step: CompressionStep) -> None:
        for name, number in step.scores.kept.items():
            sequence, context = self.sequences[name], self.asked[name].context
            assert _covered(sequence.repeated) >= context, f"scores of {name} are kept that are not whole"
            self.known_scores[number] = self._score_id(sequence, context, name)
        for name, number in step.scores.recalled.items():
            sequence = self.sequences[name]
            expected = self._score_id(sequence, self.asked[name].context, name)
            assert self.known_scores.get(number) == expected, f"{name} recalls scores of another context, or of none"
            sequence.recalled = True
            self.events["scores recalled"] += 1
        for number in step.scores.forgotten:
            del self.known_scores[number]

    def _score_id(self, sequence: Sequence, context: int, name: str) -> int:
        return hash((int(sequence.values[context - 1]), text_id(self.asked[name].tracker)))

    # Plans.

    def _run_plans(self, step: CompressionStep) -> None:
        self._share_scores(step)
        for part in step.parts:
            self._carry_on(part)
        plans = step.compress
        for plan in plans:
            self._check_plan(plan)
        self._check_apart(plans)
        for plan in plans:
            begun = self.sequences[plan.request_id].begun
            self._take_time(plan, 1.0 if begun is None else 1.0 - begun.until)
            has_failed = self.to_fail > 0
            self.to_fail -= has_failed
            self._write_front(plan, has_failed)
        targets = {one.request_id: one.copies for one in step.fronts if one.copies}
        sources = [block for plan in plans if plan.request_id in targets for block in plan.blocks]
        self._copy(sources, [block for plan in plans for block in targets.get(plan.request_id, ())])

    def _sources(self, name: str) -> set[int]:
        """Blocks that a compression of the request reads."""
        sequence = self.sequences[name]
        return {sequence.blocks[0][slot // BLOCK_SIZE] for slot in sequence.slots().tolist()}

    def _moves(self, name: str) -> list[MoveWindow]:
        return [one for one in self._step.moves if one.request_id == name]

    def _copies(self, name: str) -> list[int]:
        return [block for one in self._step.fronts if one.request_id == name for block in one.copies]

    def _targets(self, plan: Compress) -> list[int]:
        return [*plan.blocks, *self._copies(plan.request_id)]

    def _written(self, plan: Compress) -> list[int]:
        return [*self._targets(plan), *(block for one in self._moves(plan.request_id) for block in one.blocks)]

    def _check_apart(self, plans: list[Compress]) -> None:
        """Checks that no plan writes what another one, or one that is under way, reads or writes."""
        read = {plan.request_id: self._sources(plan.request_id) for plan in plans}
        for plan in plans:
            read[plan.request_id].update(block for one in self._moves(plan.request_id) for block in one.sources)
        written = {plan.request_id: set(self._written(plan)) for plan in plans}
        for name, sequence in self.sequences.items():
            if sequence.begun is not None and name not in read:
                read[name] = self._sources(name)
                written[name] = set(self._written(sequence.begun.plan))
        for name, blocks in written.items():
            for other in written:
                if other != name:
                    taken = blocks & (read[other] | written[other])
                    assert not taken, f"the compressions of {name} and {other} meet in blocks {taken}"

    def _check_plan(self, plan: Compress) -> None:
        """Checks that a plan is of what its request holds."""
        name = plan.request_id
        assert name in self.sequences, f"a plan of {name}, which has ended"
        sequence, config = self.sequences[name], parse_compression(plan.compression)
        leaves_tail = plan.is_refresh and config.decode == "grow"
        covered = sequence.tail if leaves_tail else sequence.computed
        assert (plan.seq_len, plan.num_tokens) == (sequence.computed, covered), f"the plan of {name} is of another"
        self._check_purpose(plan, sequence, config)
        assert not set(plan.blocks) & {0}, f"the front of {name} is in the null block"
        self._check_holds(sequence, sequence.blocks[0], f"the compression of {name}")
        if not sequence.is_compressed and not sequence.is_adopted:
            self._check_scored(plan, sequence, config)
        if plan.external_tokens:
            assert plan.external_tokens >= plan.seq_len, f"the complete cache of {name} has no room"
            assert sequence.complete >= sequence.tail, f"tokens of {name} are missing in its complete cache"
            sequence.complete = plan.seq_len
        if sequence.begun is not None:
            assert sequence.begun.plan is plan, f"{name} goes on with another plan than it began with"
            held = self.content[sequence.begun.targets]
            assert (held == sequence.begun.filling).all(), f"somebody writes where {name} is being compressed to"
        self._check_sole(self._targets(plan), f"is written to by the compression of {name}")
        in_windows = [block for one in self._moves(name) for block in one.blocks]
        # A front that is a copy holds its windows from now on.
        own_front = Counter(in_windows if self._copies(name) else ())
        self._check_sole(in_windows, f"is turned by the compression of {name}", own_front)

    def _check_purpose(self, plan: Compress, sequence: Sequence, config: CompressionSpec) -> None:
        context = self.asked[plan.request_id].context
        if plan.is_of_context:
            assert (plan.purpose == "part") == (plan.seq_len < context), f"{plan.request_id} is compressed too early"
        if plan.is_refresh:
            assert config.refresh is not None and sequence.is_compressed, f"{plan.request_id} is not to be refreshed"

    def _carry_on(self, part: CompressPart) -> None:
        plan = part.compress
        sequence = self.sequences[plan.request_id]
        self._check_plan(plan)
        if sequence.begun is None:
            self._check_apart([plan])
            live = self._sources(plan.request_id)
            targets = [block for block in self._targets(plan) if block not in live]
            sequence.begun = Begun(plan, targets, hash((sequence.state, 1, plan.seq_len)))
            self.content[targets] = sequence.begun.filling
            self.unclean[targets] = True
            self.events["compressions spread"] += 1
        self._take_time(plan, part.until - sequence.begun.until)
        sequence.begun.until = self._report.progress[plan.request_id] = part.until

    def _take_time(self, plan: Compress, share: float) -> None:
        sequence = self.sequences[plan.request_id]
        num_entries = plan.num_tokens if plan.is_refresh else sequence.places + plan.num_tokens - sequence.tail
        spent = self._report.spent.setdefault((plan.compression, num_entries.bit_length()), Spent())
        seconds = share * num_entries * self.seconds_per_entry
        spent.seconds, spent.entries = spent.seconds + seconds, spent.entries + share * num_entries
        spent.awaited += seconds if self._step.is_awaited else 0.0
        self.now += seconds

    def _write_front(self, plan: Compress, has_failed: bool) -> None:
        name, config = plan.request_id, parse_compression(plan.compression)
        sequence = self.sequences[name]
        what = plan.num_tokens, plan.budget, plan.is_refresh, has_failed
        state = hash((sequence.state, text_id(config.front_policy), *what))
        num_blocks = len(plan.blocks)
        if plan.share_blocks and self._head_pages:
            # How many it needs depends on what is in it.
            may_shrink = not config.policy.allocator.fills_budget
            needed = self._needed.setdefault(state, 1 + abs(state) % num_blocks if may_shrink else num_blocks)
            assert needed <= num_blocks, f"the front of {name} has {num_blocks} blocks, and needs {needed}"
            slots = needed * BLOCK_SIZE
            if may_shrink:
                entries = min(plan.budget, slots)
                self._report.fronts[name] = FrontReport(plan.seq_len, needed, entries)
                self.events["fronts reported"] += 1
        else:
            slots = plan.new_front
        assert slots <= num_blocks * BLOCK_SIZE, f"the front of {name} does not fit into its blocks"
        if sequence.is_compressed or sequence.is_adopted or config.awaits_pressure:
            self.events["later compressions"] += 1
        self._note_course(name, sequence, plan, config)
        sequence.front, sequence.front_id, sequence.places = slots, state, plan.new_front
        sequence.tail, sequence.changed_at, sequence.state = plan.num_tokens, plan.seq_len, state
        sequence.begun, sequence.scored, sequence.repeated, sequence.recalled = None, None, [], False
        sequence.tracks, sequence.has_failed = config.tracks(plan.purpose == "part"), has_failed
        # A block that stays where it was may hold tokens behind the front.
        moved = [block for block, old in zip(plan.blocks, sequence.blocks[0], strict=False) if block != old]
        self.content[moved] = hash((state, 0))
        prefix = plan.row_prefix(BLOCK_SIZE)
        sequence.blocks[0][: len(prefix)] = prefix
        positions = np.arange(slots)
        ids = np.array(plan.blocks, np.int64)[positions // BLOCK_SIZE]
        self.content[ids, positions % BLOCK_SIZE] = ENTRIES[:slots] + np.int64(state)
        self.unclean[plan.blocks] = True
        self._turn_windows(plan, sequence)
        for kept in self._step.fronts:
            if kept.request_id == name:
                assert kept.num_tokens == plan.num_tokens == plan.seq_len, f"the front of {name} is of other tokens"
                self.fronts[kept.key] = sequence.keep(plan.num_tokens, config.front_policy, kept.keeps_queries)
                self.in_flight.add(kept.key)
                self.events["fronts made to be shared"] += 1
        if has_failed:
            self._report.failures[name] = Failure("planted", "merger:planted")
            self.events["compressions failed"] += 1
        self.events["refreshes" if plan.is_refresh else "compressions"] += 1

    def _turn_windows(self, plan: Compress, sequence: Sequence) -> None:
        """Keys in windows move as those of a front's positions do."""
        turn = np.int64(hash((sequence.state, 2)))
        for index, window in enumerate(self._moves(plan.request_id)):
            first, blocks = window.first_row, sequence.blocks[window.group]
            rows = slice(first, first + len(window.blocks))
            assert blocks[rows] == window.sources, f"the windows of {plan.request_id} are in other blocks"
            self.content[window.blocks] = self.content[window.sources]
            self.unclean[window.blocks] = self.unclean[window.sources]
            blocks[rows] = window.blocks
            positions = np.arange(first * BLOCK_SIZE, plan.seq_len)
            if not index:
                sequence.in_windows[positions] ^= turn
            ids = np.array(blocks)[positions // BLOCK_SIZE]
            self.content[ids, positions % BLOCK_SIZE] ^= turn
            self.events["windows turned"] += 1

    def _note_course(self, name: str, sequence: Sequence, plan: Compress, config: CompressionSpec) -> None:
        """Checks that a request that is computed again goes through the same compressions."""
        sequence.course.append((plan.seq_len, plan.num_tokens, sequence.places, plan.new_front, plan.budget))
        if config.awaits_pressure or sequence.is_adopted:
            self.courses.pop(name, None)
            return
        known = self.courses.get(name, [])
        if len(sequence.course) > len(known):
            self.courses[name] = list(sequence.course)
        common = min(len(known), len(sequence.course))
        assert sequence.course[:common] == known[:common], f"{name} goes through other compressions than before"

    def _sample(self, name: str) -> list[int]:
        sequence = self.sequences[name]
        if sequence.computed < len(sequence.tokens):
            return []
        # The same after the same, so that generated tokens are found in the prefix cache too.
        sequence.tokens.append(abs(sequence.state) % NUM_TOKEN_IDS + 1)
        return [sequence.tokens[-1]]

    # Between steps.

    def lose_memory(self) -> None:
        """As when the engine sleeps."""
        self.content[:] = -1
        self.unclean[:] = False


def _covered(ranges: list[tuple[int, int]]) -> int:
    """End of the tokens from the first one on that the ranges cover without a gap."""
    end = 0
    for start, stop in sorted(ranges):
        if start <= end:
            end = max(end, stop)
    return end
