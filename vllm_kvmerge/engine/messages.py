"""Messages between scheduler and workers: a step's work besides vLLM's own, and the workers' reports.

Workers know a request's front and tail from what they were told before; a message has what is new.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # compactions can be run without vLLM
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

Purpose = Literal["part", "context", "growth", "refresh"]
"""What a compression is of: a part of a context of which more follows, the context or what is left of it, a cache that
has outgrown its budget or gives room to others, or the complete cache outside the pool."""


@dataclass(frozen=True)
class Compress:
    """Compression of one request's cache after the step's tokens have been sampled.

    request_id: vLLM's.
    compression: the request's ``kv_compression`` as JSON text.
    purpose: see ``Purpose``.
    num_tokens: first tokens that the new front stands for, where its tail begins.
    seq_len: tokens computed so far; more than ``num_tokens`` where a refresh leaves the tail as it is.
    budget: live entries per KV head, on average over layers and heads.
    new_front: places of each head in the new front, room for the largest of the heads' budgets. It lies in slots ``[0,
        new_front)``.
    blocks: ids of the front's blocks. In the request's block table null blocks follow, up to the tail's first one.
    share_blocks: how many of them have pages that heads with different budgets share; 0: heads are alike.
    external_tokens: tokens that the complete cache outside the pool must have room for; 0: none is kept.
    """

    request_id: str
    compression: str
    purpose: Purpose
    num_tokens: int
    seq_len: int
    budget: int
    new_front: int
    blocks: list[int]
    share_blocks: int = 0
    external_tokens: int = 0

    @property
    def is_refresh(self) -> bool:
        return self.purpose == "refresh"

    @property
    def is_of_context(self) -> bool:
        return self.purpose in ("part", "context")

    def row_prefix(self, block_size: int) -> list[int]:
        """The new beginning of the request's block table; the rest stays."""
        return self.blocks + [NULL_BLOCK] * (self.num_tokens // block_size - len(self.blocks))


NULL_BLOCK = 0
"""Id of vLLM's block that holds nothing."""


@dataclass(frozen=True)
class CompressPart:
    """A part of a compression, but not the last, which is a ``Compress`` of a later step.

    compress: the whole.
    until: share of the work that has been done then.
    num_parts: that the work is cut into, about.
    seconds: that the step has for it; what does not fit is left to later ones.
    """

    compress: Compress
    until: float
    num_parts: int
    seconds: float = math.inf


@dataclass(frozen=True)
class MoveWindow:
    """Blocks of a request that is compressed, in a group of layers with a window, whose keys are turned because its
    positions have moved.

    request_id: vLLM's.
    group: index of the group of layers.
    first_row: place of the first block in the request's block table.
    sources, blocks: ids before and after; where they differ, because others read the source, it is copied.
    """

    request_id: str
    group: int
    first_row: int
    sources: list[int]
    blocks: list[int]


@dataclass(frozen=True)
class Adopt:
    """A request's begin with a front that another one has left, instead of computing what it stands for.

    key: of the front.
    compression: the request's ``kv_compression`` as JSON text.
    front, tail: slots of the front, and where the tail begins.
    num_tokens: that are computed with it.
    is_partial: more of its context follows.
    query_window: number of the newest queries to keep.
    sources, blocks: ids of some of the front's blocks and of the request's own, to which they are copied before the
        step.
    restores_output: the prompt ends with the front. Its last token is computed again, and what comes out replaced by
        what came out then.
    exact, restored: ids of blocks of layers with a window, which are then copied to those that it was written to.
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
class Score:
    """Queries that are scored and kept for a request's first compression.

    start: position of the first one.
    compression: the request's ``kv_compression`` as JSON text.
    query_window: number of the newest queries to keep.
    end: where the compression is due; None: that is not known.
    """

    start: int
    compression: str
    query_window: int
    end: int | None = None


@dataclass(frozen=True)
class Repeat:
    """A chunk of a request's context that an internal request repeats, and scores for it.

    parent: id of the request whose context it is.
    context: tokens of the context, the first of both requests.
    start, end: the chunk.
    sinks: first tokens whose keys attention is shared with.
    normalizes: probabilities are weighed (``Tracker.normalizes``).
    """

    parent: str
    context: int
    start: int
    end: int
    sinks: int
    normalizes: bool = False


@dataclass(frozen=True)
class Verify:
    """Tokens of an answer that an internal request scores with the full cache.

    offset: of the step's first token whose logits are compared with the answer's next one, among the request's.
    first, count: place in the answer of the token that these are compared with, and how many are.
    num_prompt_tokens: before the answer.
    tokens: all of prompt and answer.
    params: of the answer's request (``vllm.SamplingParams``), by which logits are processed.
    adapter: LoRA's id; 0: none.
    masks: of its grammar, one for each that is compared (``GrammarMasks.between``); empty: it has none.
    """

    offset: int
    first: int
    count: int
    num_prompt_tokens: int
    tokens: list[int]
    params: Any
    adapter: int = 0
    masks: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Keep:
    """What workers keep of a request for others that begin with it: the front that it has after a compression, or all
    that it held when it ended.

    request_id: vLLM's.
    key: that it is kept under.
    num_tokens: of which it is, the first ones.
    keeps_queries: with the newest queries, because its policy goes on reading them.
    copies: ids of the blocks that a new front is copied to, because its request goes on writing to its own.
    num_preemptions: of the request so far, which has other blocks after the next one.
    """

    request_id: str
    key: bytes
    num_tokens: int
    keeps_queries: bool = False
    copies: list[int] = field(default_factory=list)
    num_preemptions: int = 0


@dataclass(frozen=True)
class ShareScores:
    """What becomes of the scores of repeated contexts, in this order.

    kept: by request, the number under which workers keep the scores of its context, which this step completes.
    recalled: by request, the number of scores kept before that are those of its context.
    forgotten: numbers of scores that are needed no more after that.
    """

    kept: dict[str, int] = field(default_factory=dict)
    recalled: dict[str, int] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)


@dataclass
class CompressionStep:
    """What workers do in a step besides vLLM's own work, in this order.

    poison: ids of blocks that are filled with NaN.
    turns: what ended requests leave for their next turns.
    adopt: by request that begins with a front.
    drop: keys of fronts that are gone.
    score: by request, the queries that it scores.
    repeat: by internal request, the chunk that it repeats.
    verify: by internal request, the tokens that it scores.
    outputs: requests that compute their context's last token, whose output is kept with its front.
    scores: of repeated contexts.
    parts: of compressions that a later step completes.
    compress: compressions that this step completes.
    moves: of these, blocks in layers with a window.
    fronts: of these, what they leave for others.

    The scheduler's own are ``is_awaited``, true if requests that are computed in this step wait for the compressions,
    which workers report back, and ``usage``, steps of ``Accounts``, which is not sent.
    """

    poison: list[int] = field(default_factory=list)
    turns: list[Keep] = field(default_factory=list)
    adopt: dict[str, Adopt] = field(default_factory=dict)
    drop: list[bytes] = field(default_factory=list)
    score: dict[str, Score] = field(default_factory=dict)
    repeat: dict[str, Repeat] = field(default_factory=dict)
    verify: dict[str, Verify] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    scores: ShareScores = field(default_factory=ShareScores)
    parts: list[CompressPart] = field(default_factory=list)
    compress: list[Compress] = field(default_factory=list)
    moves: list[MoveWindow] = field(default_factory=list)
    fronts: list[Keep] = field(default_factory=list)
    is_awaited: bool = False
    usage: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"usage": {}}


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


@dataclass(frozen=True)
class TokenScores:
    """An answer's tokens from place ``first`` on, with the full cache. log_probs: of the logits as the model gives
    them, of tokens that the request's grammar allows. agrees: the largest logit, after the request's logits processors,
    is the token's, up to rounding."""

    first: int
    log_probs: list[float]
    agrees: list[bool]


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
    spent: since the last report. verified: by internal request."""

    failures: dict[str, Failure] = field(default_factory=dict)
    fronts: dict[str, FrontReport] = field(default_factory=dict)
    counts: dict[str, HeadCounts] = field(default_factory=dict)
    progress: dict[str, float] = field(default_factory=dict)
    spent: dict[Kind, Spent] = field(default_factory=dict)
    verified: dict[str, TokenScores] = field(default_factory=dict)


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
