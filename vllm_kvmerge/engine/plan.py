"""Messages between scheduler and workers: compressions that follow a step, queries to score, and workers' reports."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # compactions can be run without vLLM
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


@dataclass(frozen=True)
class Segments:
    """A sequence's slots in use: compressed entries in ``[0, front)``, ordinary tokens from ``tail`` on.

    changed_at: tokens computed when the front was made. uneven_places: entries of each KV head that a compression reads
    in the front, dead ones included, where heads hold different numbers of them, ``front`` on average; 0: all hold
    ``front``.
    """

    front: int = 0
    tail: int = 0
    changed_at: int = 0
    uneven_places: int = 0

    @property
    def are_compressed(self) -> bool:
        return self.tail > 0

    @property
    def num_places(self) -> int:
        """Entries of each KV head that a compression reads in the front."""
        return self.uneven_places or self.front

    def num_entries(self, num_tokens: int) -> int:
        """Live entries per KV head of a sequence of ``num_tokens``."""
        return self.front + num_tokens - self.tail


UNCOMPRESSED = Segments()


@dataclass(frozen=True)
class FrontSize:
    """Size of a front that is to be made. entries: per KV head, on average. places: of each head, including those that
    stay empty. share_blocks: blocks whose pages heads with different budgets share; 0: there are none such.
    has_pages: heads hold their entries in these pages; otherwise each in as many places as any of them needs.
    may_shrink: what they hold depends on data: ``entries`` and blocks are the most."""

    entries: int
    places: int
    num_blocks: int
    share_blocks: int = 0
    has_pages: bool = False
    may_shrink: bool = False

    @classmethod
    def even(cls, entries: int, block_size: int) -> "FrontSize":
        """That of a front whose heads have equally many places, each its own part of every block."""
        return cls(entries, entries, -(-entries // block_size))


@dataclass(frozen=True)
class WindowMove:
    """Blocks of a request in a group of layers with a window, whose keys are turned because its positions have moved.

    group: its index. first_row: place of the first block in the request's block table. sources, blocks: ids before and
    after; where they differ, because others read the source, it is copied.
    """

    group: int
    first_row: int
    sources: list[int]
    blocks: list[int]


@dataclass(frozen=True)
class CompressionPlan:
    """Compression of one request's cache after the step's tokens have been sampled.

    Live entries are slots ``[0, front)`` and ``[tail, num_tokens)``; the result is ``new_front`` entries per head in
    slots ``[0, new_front)`` of ``blocks`` (ids), after which ``front = new_front`` and ``tail = num_tokens``.
    in_place: ``blocks`` are those that the front lies in already, in their order.
    compression: the request's ``kv_compression`` as JSON text. budget: live entries per head, on average over layers
    and heads; ``new_front`` fits the largest share. share_blocks: blocks whose pages the heads' budgets are rounded to;
    0: they are as the policy has them. has_pages: heads get these pages, in ``blocks``, and places of ``new_front``
    that a head has no room for are empty. may_shrink: the worker reports how many of the blocks it needs. hole: ids
    that follow ``blocks`` in the request's block table, one for each block that the sequence no longer needs.

    is_refresh: the front is made of the complete cache outside the pool instead, the tokens ``[0, num_tokens)``.
    external_tokens: tokens that the complete cache must have room for; 0: none is kept. num_computed: tokens computed
    so far, if a refresh leaves the tail as it is; None: ``num_tokens``.

    settles_shares: budgets of heads that follow data are found and used by this compression, which waits for a GPU;
    otherwise it uses what the last one found, and finds them for the next.

    is_partial: more of the context follows, which is compressed again then. is_rescored: of a context's later part: its
    statistics are made anew from the newest queries.

    key: that the worker keeps the front's state under, for requests that take it over; None: it is not shared. copies:
    ids of the blocks that the front is copied to for them, because this request goes on writing to its own. windows: of
    the other groups of layers, if RoPE counts entries of the cache.
    """

    request_id: str
    compression: str
    front: int
    tail: int
    num_tokens: int
    budget: int
    new_front: int
    blocks: list[int]
    hole: list[int] = field(default_factory=list)
    in_place: bool = False
    share_blocks: int = 0
    has_pages: bool = False
    may_shrink: bool = False
    settles_shares: bool = True
    is_refresh: bool = False
    external_tokens: int = 0
    num_computed: int | None = None
    is_partial: bool = False
    is_rescored: bool = False
    key: bytes | None = None
    copies: list[int] = field(default_factory=list)
    windows: list[WindowMove] = field(default_factory=list)

    @property
    def seq_len(self) -> int:
        """Tokens computed so far."""
        return self.num_computed or self.num_tokens

    @property
    def row_prefix(self) -> list[int]:
        """The new beginning of the request's block table; the rest stays."""
        return self.blocks + self.hole


@dataclass(frozen=True)
class PartialPlan:
    """The part of a plan that a step carries out, without the last, which a later step's ``plans`` ask for.

    until: share of the work that has been done then. num_parts: that the work is cut into, about. seconds: that the
    step has for it; what does not fit is left to later ones.
    """

    plan: CompressionPlan
    until: float
    num_parts: int
    seconds: float = math.inf


@dataclass(frozen=True)
class PromptWindow:
    """Queries from position ``start`` on that are scored and kept for a request's first compression.

    query_window: number of the newest queries to keep.
    """

    start: int
    compression: str
    query_window: int


@dataclass(frozen=True)
class RepeatedChunk:
    """A chunk of the context of the request ``parent`` that an internal request repeats, and scores for it.

    context: tokens of the context, the first of both requests. start, end: the chunk. sinks: first tokens whose keys
    attention is shared with. normalizes: probabilities are weighed (``Tracker.normalizes``).
    """

    parent: str
    context: int
    start: int
    end: int
    sinks: int
    normalizes: bool = False


@dataclass(frozen=True)
class Adoption:
    """A request's begin with a front that another one has left, instead of computing what it stands for.

    key: of the front. compression: the request's ``kv_compression`` as JSON text. front, tail: its segments.
    num_tokens: that are computed with it. is_partial: more of its context follows. query_window: number of the newest
    queries to keep. sources, blocks: ids of
    some of the front's blocks and of the request's own, to which they are copied before the step. restores_output: the
    prompt ends with the front. Its last token is computed again, and what comes out replaced by what came out then; of
    layers with a window, the blocks ``exact`` (ids) are then copied to those that it was written to, ``restored``.
    """

    key: bytes
    compression: str
    front: int
    tail: int
    num_tokens: int
    query_window: int
    is_partial: bool = False
    sources: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    restores_output: bool = False
    exact: list[int] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class KeptTurn:
    """What a request held when it ended, for the next turn. key: that the worker keeps its state under. num_tokens: the
    first ones, of which it is. keeps_queries: its policy goes on reading the newest queries."""

    key: bytes
    num_tokens: int
    keeps_queries: bool = False


@dataclass
class CompressionStep:
    """One step's compressions, prompt windows, and repeated chunks by internal request.

    parts: of plans that are completed by a later step's ``plans``.

    adoptions: by request. outputs: requests that compute their context's last token, whose output is kept for fronts.
    turns: by request, of those that have ended. forgotten: keys of fronts that are gone.

    kept_scores, recalled_scores: by request, the number under which workers keep the scores of its context, which this
    step completes, and of scores kept before that are those of its context; in this order. forgotten_scores: numbers of
    scores that are needed no more after that.

    usage: its steps in ``Accounts``, which workers ignore. is_awaited: others wait for their next tokens while
    requests are compressed.

    poisoned: ids of blocks that are filled with NaN before anything else.
    """

    plans: list[CompressionPlan] = field(default_factory=list)
    parts: list[PartialPlan] = field(default_factory=list)
    windows: dict[str, PromptWindow] = field(default_factory=dict)
    repetitions: dict[str, RepeatedChunk] = field(default_factory=dict)
    adoptions: dict[str, Adoption] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    turns: dict[str, KeptTurn] = field(default_factory=dict)
    forgotten: list[bytes] = field(default_factory=list)
    kept_scores: dict[str, int] = field(default_factory=dict)
    recalled_scores: dict[str, int] = field(default_factory=dict)
    forgotten_scores: list[int] = field(default_factory=list)
    usage: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_awaited: bool = False
    poisoned: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """The reason why a request ends with an error. part: kind and name of the part that failed, such as ``merger:zip``;
    None: the request cannot be honoured. is_last: the part has exceeded its bounds twice, and is not used again.
    is_bad: another request is needed, not another try."""

    message: str
    part: str | None = None
    is_last: bool = False
    is_bad: bool = False


@dataclass(frozen=True)
class FrontReport:
    """What a front holds whose size depends on data. num_tokens: computed when it was made. num_blocks: that it needs,
    the first ones of the plan. entries: per KV head, on average, rounded up."""

    num_tokens: int
    num_blocks: int
    entries: int


@dataclass(frozen=True)
class HeadCounts:
    """What a compression came to, over the model's compressed layers and their KV heads. heads: their number. merged,
    evicted: entries. kept: entries that are left. least, most: of these in one head."""

    heads: int
    merged: int
    evicted: int
    kept: int
    least: int
    most: int


Kind = tuple[str, int]
"""Compressions that take about as long for each entry: the request's ``kv_compression`` as JSON text, and the binary
digits of the number of entries per KV head."""


@dataclass
class Spent:
    """Time that a worker has spent on compressions of one kind. entries: per KV head, before it, of all of them.
    awaited: seconds of it in steps with ``is_awaited``."""

    seconds: float = 0.0
    entries: float = 0.0
    awaited: float = 0.0


@dataclass
class CompressionReport:
    """A worker's report after a step. failures: by request; the caches of these hold their newest entries. fronts,
    counts: by request. progress: by request, the share that has been done of a plan that is carried out in parts.
    spent: since the last report."""

    failures: dict[str, Failure] = field(default_factory=dict)
    fronts: dict[str, FrontReport] = field(default_factory=dict)
    counts: dict[str, HeadCounts] = field(default_factory=dict)
    progress: dict[str, float] = field(default_factory=dict)
    spent: dict[Kind, Spent] = field(default_factory=dict)


# Both messages travel as an attribute of vLLM's own, which are pickled whole. A field for plugins in vLLM's classes
# would make these functions unnecessary.


NO_STEP, NO_REPORT = CompressionStep(), CompressionReport()
"""Empty ones, which nobody changes: most steps of plain requests."""


def attach(output: "SchedulerOutput | ModelRunnerOutput", message: CompressionStep | CompressionReport | None) -> None:
    """None: an empty message, which costs nothing to send."""
    output.kvmerge = message  # type: ignore[union-attr]


def attached_step(output: "SchedulerOutput") -> CompressionStep:
    """The output's step, empty for outputs that vLLM makes by itself, such as those of dummy runs."""
    return getattr(output, "kvmerge", None) or NO_STEP


def is_scheduled(output: "SchedulerOutput") -> bool:
    """Whether the scheduler made the output and will get what the worker answers; vLLM warms up with outputs of its
    own."""
    return hasattr(output, "kvmerge")


def attached_report(output: "ModelRunnerOutput") -> CompressionReport:
    return getattr(output, "kvmerge", NO_REPORT)
