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
from vllm_kvmerge.engine.plan import (
    CompressionPlan,
    CompressionReport,
    CompressionStep,
    Failure,
    FrontReport,
    PartialPlan,
    Spent,
    attach,
    attached_step,
)
from vllm_kvmerge.request.parameters import CompressionConfig, parse_compression

NUM_TOKEN_IDS = 40
STEP_SECONDS = 0.02
"""That a step takes without compressions."""

_SEED = np.random.default_rng(0)
ENTRIES = _SEED.integers(1, 1 << 62, MAX_MODEL_LEN * 2, dtype=np.int64)
"""What tells a front's entries apart, by place."""
GROUPS = [0, int(_SEED.integers(1, 1 << 62))]
"""What tells the same token in two groups of layers apart: a block's memory is one group's at a time."""


class Violation(AssertionError):
    """What must never be."""


def check(holds: bool, message: str, *values: object) -> None:
    if not holds:
        raise Violation(message.format(*values))


def text_id(text: str) -> int:
    """The same in all processes, unlike ``hash``."""
    return crc32(text.encode())


def root(salt: str | None, epoch: int) -> int:
    """What a request's first token depends on. epoch: of the model's weights."""
    return hash((text_id(salt or ""), epoch))


def known_config(text: str) -> CompressionConfig:
    config = parse_compression(text)
    assert config is not None
    return config


@dataclass
class Begun:
    """A compression under way. filling: what its new blocks hold until its last part, by slot. until: share of it that
    has been done."""

    plan: CompressionPlan
    targets: list[int]
    filling: int
    until: float = 0.0


@dataclass
class Sequence:
    """A request as the worker knows it.

    blocks: by group of layers. computed: tokens in the cache. values: what the slots of its tokens hold, by
    position; in_windows: the same of layers with a window, whose keys may be turned. state: what its next token
    depends on. front: slots of its front. front_id: what those are. places: of the plan that made it. began: first
    token that was computed since it was admitted. scored: first and end of the tokens whose queries have been
    scored; kept: first of those whose queries are kept. repeated: parts of its context whose repetition has been
    scored. complete: tokens in its complete cache. tracks: attention writes scores into its front. has_failed: its
    last compression has. course: tokens at which it was compressed.
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

    @property
    def is_compressed(self) -> bool:
        return self.front > 0

    def drop_state(self) -> None:
        """Forgets what ``Compression`` keeps of a request beside its tokens and blocks."""
        self.scored = self.kept = self.begun = None
        self.front = self.front_id = self.places = self.tail = self.changed_at = self.complete = 0
        self.repeated, self.recalled, self.is_adopted, self.course = [], False, False, []
        self.tracks = self.has_failed = False

    def compute(self, start: int, end: int) -> None:
        """Notes what tokens ``[start, end)`` come to."""
        for position in range(start, end):
            self.state = hash((self.state, self.tokens[position]))
            self.values[position] = self.in_windows[position] = self.state

    def copy(self, **changes: Any) -> "Sequence":
        return replace(self, values=self.values.copy(), in_windows=self.in_windows.copy(), **changes)

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


@dataclass(frozen=True)
class KeptFront:
    """What a worker keeps of a front in the prefix cache, and what its blocks must hold."""

    tokens: tuple[int, ...]
    salt: str | None
    policy: str
    sequence: Sequence
    keeps_queries: bool


class Worker:
    """num_groups: of layers. holders: of a block: how many there are, how many of them are fronts with it in a
    window, and whether a cached front lies in it.
    events: how often things have happened."""

    def __init__(
        self, num_blocks: int, num_groups: int, holders: Callable[[int], tuple[int, int, bool]], events: Counter[str]
    ) -> None:
        self.content = np.zeros((num_blocks, BLOCK_SIZE), np.int64)
        self.unclean = np.zeros((num_blocks, BLOCK_SIZE), bool)
        """Slots that hold what a compressed request wrote."""
        self.sequences: dict[str, Sequence] = {}
        self.fronts: dict[bytes, KeptFront] = {}
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
        self._num_groups, self._holders = num_groups, holders
        self._needed: dict[int, int] = {}
        """Blocks that fronts turned out to need, by what they were made of."""
        self._admitted: set[str] = set()
        """Requests that begin, or begin anew, with this step."""
        self._report, self._is_awaited = CompressionReport(), False

    def _note(self, event: str) -> None:
        self.events[event] += 1

    # A step.

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        step, scheduled = attached_step(output), output.num_scheduled_tokens
        self._report, self._is_awaited = CompressionReport(), step.is_awaited
        self.now += STEP_SECONDS
        adopted = self._begin(output, step)
        if output.new_block_ids_to_zero:
            self.content[output.new_block_ids_to_zero] = 0
            self.unclean[output.new_block_ids_to_zero] = False
        if copies := output.kv_cache_block_copies:  # of a block of a window that a hit ends within
            self._note("blocks of windows copied")
            unclean = self.unclean[[one.src_block_id for one in copies]]
            targets = [one.dst_block_id for one in copies]
            self._copy([one.src_block_id for one in copies], targets)
            self.unclean[targets] = unclean
        before = self._update(output, step, adopted)
        self._write_tokens(scheduled, before, step)
        for adoption in step.adoptions.values():
            self._copy(adoption.exact, adoption.restored)
            self.unclean[adoption.restored] = False
        for name in scheduled:
            # Nothing comes of a repetition whose parent has just been preempted: it has ended by now.
            if "/" not in name or name in step.repetitions:
                self.check_readable(name)
                self._check_clean_behind(name)
        self._score(scheduled, before, step)
        self._run_plans(step, scheduled)
        sampled = [self._sample(name) for name in scheduled]
        names = list(scheduled)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled if names else [],
        )
        attach(result, self._report)
        return result

    def _begin(self, output: SchedulerOutput, step: CompressionStep) -> dict[str, KeptFront]:
        """As ``Compression.begin``: keeps turns, forgets requests, and copies fronts. Returns those taken over."""
        for name, turn in step.turns.items():
            self.fronts[turn.key] = self._turn(self.sequences[name], name, turn.num_tokens, turn.keeps_queries)
            self._note("turns kept")
        preempted = (output.preempted_req_ids or set()) | output.scheduled_cached_reqs.resumed_req_ids
        for name in preempted:
            if name in self.sequences:
                self.sequences[name].drop_state()
        for name in output.finished_req_ids:
            self.sequences.pop(name, None)
        sources = [block for one in step.adoptions.values() if one.blocks for block in one.sources]
        targets = [block for one in step.adoptions.values() if one.blocks for block in one.blocks]
        self._copy(sources, targets)
        for name, adoption in step.adoptions.items():
            check(adoption.key in self.fronts, "{} begins with a front that the worker does not know", name)
        adopted = {name: self.fronts[adoption.key] for name, adoption in step.adoptions.items()}
        for key in step.forgotten:
            self.fronts.pop(key, None)
        return adopted

    def _turn(self, sequence: Sequence, name: str, num_tokens: int, keeps_queries: bool) -> KeptFront:
        check(sequence.tail <= num_tokens <= sequence.computed, "the turn of {} is not what it holds", name)
        kept = sequence.copy(computed=num_tokens)
        kept.state = int(sequence.values[num_tokens - 1]) if num_tokens > sequence.tail else sequence.front_id
        policy = self.asked[name].policy
        return KeptFront(tuple(sequence.tokens[:num_tokens]), sequence.salt, policy, kept, keeps_queries)

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        check(len(set(targets)) == len(targets), "blocks are copied to twice in one step: {}", targets)
        check(not set(sources) & set(targets), "blocks are copied from and to in one step: {} {}", sources, targets)
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
            check(block != 0, "the null block {}", what)
            num_holders, num_fronts, is_of_front = self._holders(block)
            num_holders -= num_fronts if may_follow_front else 0
            check(num_holders - finders.get(block, 0) <= 1, "block {} {} while it is shared", block, what)
            check(may_follow_front or not is_of_front, "block {} of a front in the prefix cache {}", block, what)

    def _update(self, output: SchedulerOutput, step: CompressionStep, adopted: dict[str, KeptFront]) -> dict[str, int]:
        """As the runner's ``_update_states``. Returns the tokens that each scheduled request had computed before."""
        before = dict[str, int]()
        self._admitted = set()
        for new in output.scheduled_new_reqs:
            name = new.req_id
            assert new.prompt_token_ids is not None
            self.sequences[name] = Sequence(list(new.prompt_token_ids), [list(ids) for ids in new.block_ids])
            self._admit(name, new.num_computed_tokens, adopted.get(name), step)
            before[name] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            sequence, num_computed = self.sequences[name], cached.num_computed_tokens[index]
            before[name] = num_computed
            new_blocks, tokens = cached.new_block_ids[index], cached.all_token_ids.get(name)
            if name in cached.resumed_req_ids:
                assert new_blocks is not None and tokens is not None
                sequence.tokens, sequence.blocks = list(tokens), [list(ids) for ids in new_blocks]
                self._admit(name, num_computed, adopted.get(name), step)
                continue
            if tokens is not None:
                check(sequence.tokens[: len(tokens)] == list(tokens), "the tokens of {} are others", name)
            for blocks, ids in zip(sequence.blocks, new_blocks or ([],) * self._num_groups, strict=True):
                blocks.extend(ids)
            check(
                num_computed == sequence.computed,
                "{} goes on after {} tokens, and has {}",
                name,
                num_computed,
                sequence.computed,
            )
        return before

    def _admit(self, name: str, num_computed: int, front: KeptFront | None, step: CompressionStep) -> None:
        """Begins a request anew with what it found in the prefix cache, or with a front."""
        self._admitted.add(name)
        sequence = self.sequences[name]
        sequence.salt = self.asked[name.partition("/")[0]].salt
        sequence.drop_state()
        sequence.state = root(sequence.salt, self.epoch)
        if front is None:
            sequence.compute(0, num_computed)
            sequence.computed = num_computed
            if num_computed:
                self._note("prefix-cache hits")
            return
        adoption = step.adoptions[name]
        self._note("fronts adopted")
        check(
            tuple(sequence.tokens[: adoption.num_tokens]) == front.tokens
            and front.salt == sequence.salt
            and front.policy == self.asked[name].policy,
            "{} begins with a front of other tokens, another salt or policy",
            name,
        )
        kept = front.sequence
        sequence.state, sequence.front, sequence.front_id = kept.state, kept.front, kept.front_id
        sequence.places, sequence.tail, sequence.changed_at = kept.places, kept.tail, kept.changed_at
        sequence.values[:], sequence.in_windows[:] = kept.values, kept.in_windows
        sequence.computed, sequence.is_adopted = num_computed, True
        check(
            (adoption.front, adoption.tail, adoption.num_tokens) == (kept.places, kept.tail, len(front.tokens)),
            "{} begins with a front of {} entries and {} tokens, which has {} and {}",
            name,
            adoption.front,
            adoption.tail,
            kept.places,
            kept.tail,
        )
        if adoption.restores_output:
            check(num_computed == adoption.num_tokens - 1, "{} does not compute its last token again", name)
            self._note("outputs restored")
        else:
            check(num_computed == adoption.num_tokens, "{} has {} tokens of its front", name, num_computed)
        config = known_config(adoption.compression)
        sequence.tracks = config.tracks(adoption.is_partial)
        if front.keeps_queries:
            sequence.kept = 0

    def _write_tokens(self, scheduled: dict[str, int], before: dict[str, int], step: CompressionStep) -> None:
        written: set[tuple[int, int]] = set()
        for name, num_new in scheduled.items():
            sequence, start = self.sequences[name], before[name]
            end = start + num_new
            check(sequence.begun is None, "{} is computed while it is compressed", name)
            check(end <= len(sequence.tokens), "{} computes tokens that it does not have", name)
            adoption = step.adoptions.get(name)
            if adoption is not None and adoption.restores_output:
                # Nothing comes of this token, and nobody reads its slot.
                values = np.array([hash((sequence.state, start))])
            else:
                sequence.compute(start, end)
                values = sequence.values[start:end]
            sequence.computed = end
            if sequence.tracks and (adoption is None or not adoption.restores_output):
                front = sequence.blocks[0][: -(-sequence.front // BLOCK_SIZE)]
                self._check_sole(front, f"gets scores of {name}")
            offsets = np.arange(start, end)
            for group, blocks in enumerate(sequence.blocks):
                ids = np.array(blocks[: -(-end // BLOCK_SIZE)])
                check(len(ids) * BLOCK_SIZE >= end, "{} has no block for its new tokens", name)
                ids = ids[offsets // BLOCK_SIZE]
                self._check_sole(set(ids.tolist()), f"is written to by {name}", self._finders(name, group), group > 0)
                slots = list(zip(ids.tolist(), (offsets % BLOCK_SIZE).tolist(), strict=True))
                check(not written.intersection(slots), "{} writes to slots of another request", name)
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
        check(bool((ids != 0).all()), "{} reads the null block within its window", name)
        held = self.content[ids, positions % BLOCK_SIZE] ^ GROUPS[group]
        wrong = np.flatnonzero(held != sequence.in_windows[positions])
        check(not len(wrong), "{} reads what is not its own within its window, at {}", name, positions[wrong])

    def _check_holds(self, sequence: Sequence, blocks: list[int], name: object) -> None:
        slots = sequence.slots()
        ids = np.array(blocks, np.int64)[slots // BLOCK_SIZE]
        check(bool((ids != 0).all()), "{} reads the null block", name)
        wrong = np.flatnonzero(self.content[ids, slots % BLOCK_SIZE] != sequence.held())
        check(
            not len(wrong),
            "{} reads what is not its own in slots {} (front {}, tail {}, {} tokens, blocks {})",
            name,
            slots[wrong],
            sequence.front,
            sequence.tail,
            sequence.computed,
            blocks,
        )

    def check_front(
        self, key: bytes, rows: Iterable[int], blocks: Iterable[int], windows: Mapping[int, tuple[int, list[int]]]
    ) -> None:
        """Checks that the blocks of a front in the prefix cache hold it. windows: first rows and blocks, by group."""
        kept = self.fronts.get(key)
        check(kept is not None, "the worker does not know a front in the prefix cache")
        assert kept is not None
        check(key not in self.in_flight, "a front is offered before it has been computed")
        check(not kept.sequence.has_failed, "a front is offered whose compression has failed")
        table = dict(zip(rows, blocks, strict=True))
        row = [table.get(index, 0) for index in range(max(table) + 1)]
        self._check_holds(kept.sequence, row, f"a front of {len(kept.tokens)} tokens")
        for group, (first_row, ids) in windows.items():
            positions = np.arange(first_row * BLOCK_SIZE, kept.sequence.computed)
            what = f"a front of {len(kept.tokens)} tokens"
            self._check_window(kept.sequence, group, np.array([0] * first_row + ids), positions, what)

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
            check(not behind.any(), "behind {} lies what a compressed request wrote", name)

    # Scores of queries.

    def _score(self, scheduled: dict[str, int], before: dict[str, int], step: CompressionStep) -> None:
        for name in scheduled:
            sequence, start = self.sequences[name], before[name]
            if (chunk := step.repetitions.get(name)) is not None:
                parent = self.sequences[chunk.parent]
                if sequence.computed == len(sequence.tokens):
                    # The first tokens are not repeated: all chunks attend to them.
                    parent.repeated.append((0 if chunk.start <= chunk.sinks else chunk.start, chunk.end))
                    self._note("chunks repeated")
                continue
            window = step.windows.get(name)
            if window is None or sequence.is_compressed or window.start >= sequence.computed:
                continue
            if sequence.kept is None:
                sequence.kept = start
            first, end = sequence.scored or (max(start, window.start), start)
            # A gap ends what has been scored.
            sequence.scored = (first if end in (start, first) or sequence.scored is None else start), sequence.computed

    def _check_scored(self, plan: CompressionPlan, sequence: Sequence, config: CompressionConfig) -> None:
        """Checks that the queries that a first compression needs have been scored, or kept."""
        name, end, tracker = plan.request_id, plan.num_tokens, config.policy.tracker
        if tracker.repeats_context:
            is_whole = _covered(sequence.repeated) >= end
            check(sequence.recalled or is_whole, "the context of {} has not been repeated", name)
            return
        if config.awaits_pressure or tracker.predicts_scores:
            return
        window = config.prompt_window
        first = 0 if window == "all" else max(0, end - window)
        if window:
            scored = sequence.scored
            check(
                scored is not None and scored[0] <= first and scored[1] == end,
                "{} lacks scores of queries from {} to {}: {}",
                name,
                first,
                end,
                scored,
            )
        if config.query_window:
            first = max(0, end - config.query_window)
            check(sequence.kept is not None and sequence.kept <= first, "{} lacks its newest queries", name)

    def _share_scores(self, step: CompressionStep) -> None:
        for name, number in step.kept_scores.items():
            sequence, context = self.sequences[name], self.asked[name].context
            check(_covered(sequence.repeated) >= context, "scores of {} are kept that are not whole", name)
            self.known_scores[number] = self._score_id(sequence, context, name)
        for name, number in step.recalled_scores.items():
            check(number in self.known_scores, "{} recalls scores that nobody keeps", name)
            sequence = self.sequences[name]
            found = self.known_scores[number] == self._score_id(sequence, self.asked[name].context, name)
            check(found, "{} recalls scores of another context", name)
            sequence.recalled = True
            self._note("scores recalled")
        for number in step.forgotten_scores:
            del self.known_scores[number]

    def _score_id(self, sequence: Sequence, context: int, name: str) -> int:
        return hash((int(sequence.values[context - 1]), text_id(self.asked[name].tracker)))

    # Plans.

    def _run_plans(self, step: CompressionStep, scheduled: dict[str, int]) -> None:
        self._share_scores(step)
        for part in step.parts:
            self._carry_on(part)
        plans = step.plans
        targets = [self._written(plan) for plan in plans]
        for plan in plans:
            self._check_plan(plan)
        self._check_apart(plans, targets)
        failed = [self._fails() for _ in plans]
        for plan, has_failed in zip(plans, failed, strict=True):
            begun = self.sequences[plan.request_id].begun
            self._take_time(plan, 1.0 if begun is None else 1.0 - begun.until)
            self._write_front(plan, has_failed)
        shared = [plan for plan in plans if plan.copies]
        sources = [block for plan in shared for block in plan.blocks]
        self._copy(sources, [block for plan in shared for block in plan.copies])

    def _fails(self) -> bool:
        fails = self.to_fail > 0
        self.to_fail -= fails
        return fails

    def _sources(self, name: str) -> set[int]:
        """Blocks that a compression of the request reads."""
        sequence = self.sequences[name]
        return {sequence.blocks[0][slot // BLOCK_SIZE] for slot in sequence.slots().tolist()}

    def _targets(self, plan: CompressionPlan) -> list[int]:
        return [*plan.blocks, *plan.copies]

    def _written(self, plan: CompressionPlan) -> list[int]:
        return [*self._targets(plan), *(block for window in plan.windows for block in window.blocks)]

    def _check_apart(self, plans: list[CompressionPlan], targets: list[list[int]]) -> None:
        """Checks that no plan writes what another one, or one that is under way, reads or writes."""
        read = {plan.request_id: self._sources(plan.request_id) for plan in plans}
        for plan in plans:
            read[plan.request_id].update(block for window in plan.windows for block in window.sources)
        written = dict(zip(read, map(set, targets), strict=True))
        for name, sequence in self.sequences.items():
            if sequence.begun is not None and name not in read:
                read[name] = self._sources(name)
                written[name] = set(self._written(sequence.begun.plan))
        for name, blocks in written.items():
            for other in written:
                if other != name:
                    taken = blocks & (read[other] | written[other])
                    check(not taken, "the compressions of {} and {} meet in blocks {}", name, other, taken)

    def _check_plan(self, plan: CompressionPlan) -> None:
        """Checks that a plan is of what its request holds."""
        name = plan.request_id
        check(name in self.sequences, "a plan of {}, which has ended", name)
        sequence, config = self.sequences[name], known_config(plan.compression)
        check(
            (plan.front, plan.tail) == (sequence.places, sequence.tail),
            "the plan of {} reads {} entries and tokens from {}, and there are {} and those from {}",
            name,
            plan.front,
            plan.tail,
            sequence.places,
            sequence.tail,
        )
        check(plan.seq_len == sequence.computed, "the plan of {} is of {} tokens", name, plan.seq_len)
        leaves_tail = plan.is_refresh and config.decode == "grow"
        covered = sequence.tail if leaves_tail else sequence.computed
        check(
            plan.num_tokens == covered, "the front of {} stands for {} tokens, not {}", name, plan.num_tokens, covered
        )
        check(not set(plan.blocks) & {0}, "the front of {} is in the null block", name)
        self._check_holds(sequence, sequence.blocks[0], f"the compression of {name}")
        if not sequence.is_compressed and not sequence.is_adopted:
            self._check_scored(plan, sequence, config)
        if plan.external_tokens:
            check(plan.external_tokens >= plan.seq_len, "the complete cache of {} has no room", name)
            check(sequence.complete >= sequence.tail, "tokens of {} are missing in its complete cache", name)
            sequence.complete = plan.seq_len
        if sequence.begun is not None:
            check(sequence.begun.plan is plan, "{} goes on with another plan than it began with", name)
            self._check_filling(sequence.begun, name)
        self._check_sole(self._targets(plan), f"is written to by the compression of {name}")
        in_windows = [block for window in plan.windows for block in window.blocks]
        # A front that is a copy holds its windows from now on.
        own_front = Counter(in_windows if plan.copies else ())
        self._check_sole(in_windows, f"is turned by the compression of {name}", own_front)

    def _carry_on(self, part: PartialPlan) -> None:
        plan = part.plan
        sequence = self.sequences[plan.request_id]
        if sequence.begun is None:
            self._check_plan(plan)
            self._check_apart([plan], [self._written(plan)])
            live = self._sources(plan.request_id)
            targets = [block for block in self._targets(plan) if block not in live]
            sequence.begun = Begun(plan, targets, hash((sequence.state, 1, plan.seq_len)))
            self.content[targets] = sequence.begun.filling
            self.unclean[targets] = True
            self._note("compressions spread")
        else:
            check(sequence.begun.plan is plan, "{} goes on with another plan than it began with", plan.request_id)
            self._check_holds(sequence, sequence.blocks[0], f"the compression of {plan.request_id}")
            self._check_filling(sequence.begun, plan.request_id)
        self._take_time(plan, part.until - sequence.begun.until)
        sequence.begun.until = self._report.progress[plan.request_id] = part.until

    def _take_time(self, plan: CompressionPlan, share: float) -> None:
        num_entries = plan.num_tokens if plan.is_refresh else plan.front + plan.num_tokens - plan.tail
        spent = self._report.spent.setdefault((plan.compression, num_entries.bit_length()), Spent())
        seconds = share * num_entries * self.seconds_per_entry
        spent.seconds, spent.entries = spent.seconds + seconds, spent.entries + share * num_entries
        spent.awaited += seconds if self._is_awaited else 0.0
        self.now += seconds

    def _check_filling(self, begun: Begun, name: str) -> None:
        check(
            bool((self.content[begun.targets] == begun.filling).all()),
            "somebody else writes to the new blocks of {}, whose compression is under way",
            name,
        )

    def _write_front(self, plan: CompressionPlan, has_failed: bool) -> None:
        name, config = plan.request_id, known_config(plan.compression)
        sequence = self.sequences[name]
        what = plan.num_tokens, plan.budget, plan.is_refresh, has_failed
        state = hash((sequence.state, text_id(config.front_policy), *what))
        num_blocks = len(plan.blocks)
        if plan.has_pages:
            # How many it needs depends on what is in it.
            needed = self._needed.setdefault(state, 1 + abs(state) % num_blocks if plan.may_shrink else num_blocks)
            check(needed <= num_blocks, "the front of {} has {} blocks, and needs {}", name, num_blocks, needed)
            slots = needed * BLOCK_SIZE
            if plan.may_shrink:
                entries = min(plan.budget, slots)
                self._report.fronts[name] = FrontReport(plan.seq_len, needed, entries)
                self._note("fronts reported")
        else:
            slots = plan.new_front
        check(slots <= num_blocks * BLOCK_SIZE, "the front of {} does not fit into its blocks", name)
        if sequence.is_compressed or sequence.is_adopted or config.awaits_pressure:
            self._note("later compressions")
        self._note_course(name, sequence, plan, config)
        sequence.front, sequence.front_id, sequence.places = slots, state, plan.new_front
        sequence.tail, sequence.changed_at, sequence.state = plan.num_tokens, plan.seq_len, state
        sequence.begun, sequence.scored, sequence.repeated, sequence.recalled = None, None, [], False
        sequence.tracks, sequence.has_failed = config.tracks(plan.is_partial), has_failed
        # A block that stays where it was may hold tokens behind the front.
        moved = [block for block, old in zip(plan.blocks, sequence.blocks[0], strict=False) if block != old]
        self.content[moved] = hash((state, 0))
        sequence.blocks[0][: len(plan.row_prefix)] = plan.row_prefix
        positions = np.arange(slots)
        ids = np.array(plan.blocks, np.int64)[positions // BLOCK_SIZE]
        self.content[ids, positions % BLOCK_SIZE] = ENTRIES[:slots] + np.int64(state)
        self.unclean[plan.blocks] = True
        self._turn_windows(plan, sequence)
        if plan.key is not None:
            kept = sequence.copy()
            keeps_queries = config.decode == "bounded" or plan.is_partial
            tokens = tuple(sequence.tokens[: plan.num_tokens])
            self.fronts[plan.key] = KeptFront(tokens, sequence.salt, config.front_policy, kept, keeps_queries)
            self.in_flight.add(plan.key)
            self._note("fronts made to be shared")
        if has_failed:
            self._report.failures[name] = Failure("planted", "merger:planted")
            self._note("compressions failed")
        self._note("refreshes" if plan.is_refresh else "compressions")

    def _turn_windows(self, plan: CompressionPlan, sequence: Sequence) -> None:
        """Keys in windows move as those of a front's positions do."""
        turn = np.int64(hash((sequence.state, 2)))
        for index, window in enumerate(plan.windows):
            first, blocks = window.first_row, sequence.blocks[window.group]
            rows = slice(first, first + len(window.blocks))
            check(blocks[rows] == window.sources, "the windows of {} are in other blocks", plan.request_id)
            self.content[window.blocks] = self.content[window.sources]
            self.unclean[window.blocks] = self.unclean[window.sources]
            blocks[rows] = window.blocks
            positions = np.arange(first * BLOCK_SIZE, plan.seq_len)
            if not index:
                sequence.in_windows[positions] ^= turn
            ids = np.array(blocks)[positions // BLOCK_SIZE]
            self.content[ids, positions % BLOCK_SIZE] ^= turn
            self._note("windows turned")

    def _note_course(self, name: str, sequence: Sequence, plan: CompressionPlan, config: CompressionConfig) -> None:
        """Checks that a request that is computed again goes through the same compressions."""
        sequence.course.append((plan.seq_len, plan.num_tokens, plan.front, plan.new_front, plan.budget))
        if config.awaits_pressure or sequence.is_adopted:
            self.courses.pop(name, None)
            return
        known = self.courses.get(name, [])
        if len(sequence.course) > len(known):
            self.courses[name] = list(sequence.course)
        common = min(len(known), len(sequence.course))
        check(
            sequence.course[:common] == known[:common],
            "{} goes through other compressions than before: {} {}",
            name,
            sequence.course,
            known,
        )

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
