"""What the scheduler tells the workers: which caches to compress after this step, and which queries to score; and what
they answer."""

from dataclasses import dataclass, field

from vllm_kvmerge.policies.cost import Rates


@dataclass(frozen=True)
class CompressionPlan:
    """Compress one request after the step's forward pass.

    Live entries are slots ``[0, front)`` and ``[tail, num_tokens)``; the result is ``new_front`` entries per head in
    slots ``[0, new_front)`` of ``blocks`` (ids), after which ``front = new_front`` and ``tail = num_tokens``.
    compression: the request's ``kv_compression`` as JSON text. budget: live entries per head, on average over layers
    and heads; ``new_front`` holds the largest share of any of them.
    """

    request_id: str
    compression: str
    front: int
    tail: int
    num_tokens: int
    budget: int
    new_front: int
    blocks: list[int]


@dataclass(frozen=True)
class PromptWindow:
    """Score and keep, as its policy asks, the queries of a not yet compressed request from position ``start`` on.

    query_window: how many of the newest there will ever be to keep.
    """

    start: int
    compression: str
    query_window: int


@dataclass
class CompressionStep:
    """Attached to vLLM's SchedulerOutput as ``kvmerge``."""

    plans: list[CompressionPlan] = field(default_factory=list)
    windows: dict[str, PromptWindow] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a request ends with an error. part: kind and name of the one that failed, such as ``merger:zip``; None: the
    request cannot be honoured."""

    message: str
    part: str | None = None


@dataclass
class CompressionReport:
    """Attached to vLLM's ModelRunnerOutput as ``kvmerge`` where there is something to say.

    failures: by request, of those whose compression failed; their caches hold their newest entries.
    rates: how fast this worker computes, once, with its first output.
    """

    failures: dict[str, Failure] = field(default_factory=dict)
    rates: Rates | None = None
