"""The plugin's Prometheus metrics.

Engine cores, workers and API servers count separately; with ``PROMETHEUS_MULTIPROC_DIR`` (which ``vllm-kvmerge serve``
sets) prometheus_client sums over the processes on every API server's ``/metrics``. Label ``engine``: the data-parallel
rank, as in vLLM's own metrics.
"""

import time
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram

from vllm_kvmerge.ops.coded import CODINGS, Coding

if TYPE_CHECKING:
    from vllm_kvmerge.engine.usage import CacheSize
    from vllm_kvmerge.request.proof import Verified

GAUGE_SECONDS = 0.1
"""Time for which gauges may stand while requests generate."""

LABELS = ["policy", "engine"]
COMPACTION_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

REQUESTS = Counter("vllm:kvmerge_requests", "Requests received, by policy.", LABELS)
REJECTED = Counter("vllm:kvmerge_rejected_requests", "Requests refused because of kv_compression.", ["reason"])
GENERATED = Counter("vllm:kvmerge_generation_tokens", "Tokens generated, by policy.", LABELS)
COMPRESSIONS = Counter("vllm:kvmerge_compressions", "Compressions of a request's cache.", LABELS)
REFRESHES = Counter(
    "vllm:kvmerge_refreshes", "Compressions of a request's complete cache, included in the above.", LABELS
)
BLOCKS_FREED = Counter("vllm:kvmerge_blocks_freed", "Blocks returned to the pool by compressions.", LABELS)
BYTES_FREED = Counter("vllm:kvmerge_bytes_freed", "Bytes of those blocks, over all layers and ranks.", LABELS)
MERGED = Counter("vllm:kvmerge_entries_merged", "Cache entries (per layer and KV head) merged into others.", LABELS)
EVICTED = Counter("vllm:kvmerge_entries_evicted", "Cache entries (per layer and KV head) dropped.", LABELS)
OVERFLOWS = Counter(
    "vllm:kvmerge_overflows",
    "Cache entries (per layer and KV head) left unchanged because the merge result is not finite.",
    LABELS,
)
RELIEFS = Counter(
    "vllm:kvmerge_pressure_compressions",
    "Compressions because the pool was short of blocks (trigger pressure).",
    LABELS,
)
NOT_OFFLOADED = Counter(
    "vllm:kvmerge_not_offloaded_requests",
    "Compressed requests whose blocks the server's KV connector neither loads nor stores.",
    LABELS,
)
CONTEXT_HITS = Counter(
    "vllm:kvmerge_context_hits", "Requests that started from a compressed context in the prefix cache.", LABELS
)
CONTEXT_MISSES = Counter(
    "vllm:kvmerge_context_misses", "Requests that compressed a context not in the prefix cache.", LABELS
)
CONTEXT_HIT_TOKENS = Counter(
    "vllm:kvmerge_context_hit_tokens", "Context tokens found compressed and not computed.", LABELS
)
FAILED = Counter(
    "vllm:kvmerge_failed_compactions",
    "Requests ended with an error because a part of their policy failed.",
    ["policy", "part", "engine"],
)
REPEATING = Counter(
    "vllm:kvmerge_repeating_answers",
    "Answers whose last 64 tokens end with at least four repetitions of at most 16 tokens.",
    LABELS,
)
VERIFIED_LABELS = ["policy", "budget"]
"""budget: as the request has it, to two digits."""
VERIFIED = Counter(
    "vllm:kvmerge_verified_tokens",
    "Tokens of greedy answers that were scored with the full cache.",
    VERIFIED_LABELS,
)
AGREEING = Counter(
    "vllm:kvmerge_agreeing_tokens", "Among these, tokens that the full cache would have picked.", VERIFIED_LABELS
)
LOG_PROB_DROP = Histogram(
    "vllm:kvmerge_log_prob_drop",
    "By answer that is verified: mean of log p of its tokens with the compressed cache, less that with the full one.",
    VERIFIED_LABELS,
    buckets=(-0.1, -0.01, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
)
VERIFICATION_TOKENS = Counter("vllm:kvmerge_verification_tokens", "Tokens computed to verify answers.", VERIFIED_LABELS)
NOT_VERIFIED = Counter("vllm:kvmerge_not_verified_answers", "Answers that could not be verified.", ["policy", "reason"])
FALLBACKS = Counter(
    "vllm:kvmerge_fallback_answers", "Answers made again without compression, for min_agreement.", ["policy"]
)
SAVED_CONTEXTS = Counter(
    "vllm:kvmerge_saved_contexts", "Kept contexts in files: saved, loaded, refused, evicted.", ["event"]
)
COMPACTION_SECONDS = Histogram(
    "vllm:kvmerge_compaction_seconds",
    "Seconds to compress one request's cache, all layers; an equal share if a step compresses several.",
    LABELS,
    buckets=COMPACTION_BUCKETS,
)
REFRESH_SECONDS = Histogram(
    "vllm:kvmerge_refresh_seconds",
    "Seconds to recompress one request's complete cache, all layers, scoring included.",
    LABELS,
    buckets=COMPACTION_BUCKETS,
)
_LIVE = [
    Gauge(name, description, LABELS, multiprocess_mode="livesum")
    for name, description in (
        ("vllm:kvmerge_live_entries", "Entries per KV head and layer held by running requests."),
        ("vllm:kvmerge_represented_tokens", "Tokens represented by the live entries of running requests."),
        ("vllm:kvmerge_live_bytes", "Bytes of the blocks held by running requests."),
        ("vllm:kvmerge_external_bytes", "Bytes of running requests' complete caches outside the pool, over all ranks."),
    )
]

FRONT_BYTES = Gauge(
    "vllm:kvmerge_front_bytes",
    "Bytes of live_bytes in compressed entries, by their format: cache (the KV cache's own), int8 or int4.",
    ["format", "engine"],
    multiprocess_mode="livesum",
)
FORMATS: dict[Coding | None, str] = {None: "cache", **{coding: coding for coding in CODINGS}}

_CONTEXTS = [
    Gauge(name, description, ["engine"], multiprocess_mode="livesum")
    for name, description in (
        ("vllm:kvmerge_shared_contexts", "Compressed contexts and turns in the prefix cache."),
        ("vllm:kvmerge_shared_context_bytes", "Bytes of their blocks, over all layers and ranks."),
        ("vllm:kvmerge_kept_contexts", "Contexts that are kept under an id."),
        ("vllm:kvmerge_kept_context_bytes", "Bytes of the blocks held by kept contexts, over all layers and ranks."),
    )
]


def count_request(policy: str, engine: int, parts: Iterable[str] = ()) -> None:
    """parts: of the policy, as ``PartError.part`` names them. What counts their failures begins at 0 with the first
    request, so that ``increase`` sees the first one."""
    REQUESTS.labels(policy, engine).inc()
    for part in parts:
        _failures(policy, part, engine)
    if parts:
        _of(RELIEFS, policy, engine)


def count_verified(policy: str, budget: float, verified: "Verified") -> None:
    """budget: of the request."""
    if verified.skipped is not None:
        NOT_VERIFIED.labels(policy, verified.skipped).inc()
    if verified.fallback:
        FALLBACKS.labels(policy).inc()
    labels = policy, f"{budget:.2g}"
    VERIFICATION_TOKENS.labels(*labels).inc(verified.tokens_computed)
    if verified.log_prob_change is not None:
        LOG_PROB_DROP.labels(*labels).observe(verified.log_prob_change)
    if verified.agreeing is not None:
        VERIFIED.labels(*labels).inc(verified.tokens)
        AGREEING.labels(*labels).inc(round(verified.tokens * verified.agreeing))


def count_saved_context(event: str) -> None:
    SAVED_CONTEXTS.labels(event).inc()


def count_rejection(reason: str) -> None:
    REJECTED.labels(reason).inc()


def count_context(policy: str, engine: int, num_tokens: int) -> None:
    """Counts a request's context of which ``num_tokens`` were found compressed; 0: none were."""
    if num_tokens:
        CONTEXT_HITS.labels(policy, engine).inc()
        CONTEXT_HIT_TOKENS.labels(policy, engine).inc(num_tokens)
    else:
        CONTEXT_MISSES.labels(policy, engine).inc()


@cache
def _of(metric: Any, policy: str, engine: int) -> Any:
    """That of a policy, for metrics that steps add to: finding it takes longer than adding."""
    return metric.labels(policy, engine)


@cache
def _failures(policy: str, part: str, engine: int) -> Any:
    return FAILED.labels(policy, part, engine)


def count_generated(policy: str, engine: int, num_tokens: int) -> None:
    _of(GENERATED, policy, engine).inc(num_tokens)


def count_entries(policy: str, engine: int, num_merged: int, num_evicted: int, num_overflows: int) -> None:
    """Counts the entries of one worker's KV heads, over all layers."""
    _of(MERGED, policy, engine).inc(num_merged)
    _of(EVICTED, policy, engine).inc(num_evicted)
    if num_overflows:
        OVERFLOWS.labels(policy, engine).inc(num_overflows)


def observe_compaction(policy: str, engine: int, seconds: float, *, is_refresh: bool = False) -> None:
    _of(REFRESH_SECONDS if is_refresh else COMPACTION_SECONDS, policy, engine).observe(seconds)


class CacheGauges:
    """Gauges of the sizes of an engine's running requests' caches, summed by policy."""

    def __init__(self, engine: int, bytes_per_block: int) -> None:
        self._engine = engine
        self._bytes_per_block = bytes_per_block
        self._policies: set[str] = set()
        self._num_running, self._set_at = -1, 0.0

    def are_due(self, num_running: int, has_compressed: bool) -> bool:
        """Whether the step's sizes are to be passed on: those of steps in which caches only grow are not, more often
        than all ``GAUGE_SECONDS``."""
        now = time.monotonic()
        if num_running == self._num_running and not has_compressed and now < self._set_at + GAUGE_SECONDS:
            return False
        self._num_running, self._set_at = num_running, now
        return True

    def update(self, sizes: list[tuple[str, "CacheSize"]]) -> None:
        """``sizes``: policy and size of each running request."""
        fronts = dict.fromkeys(FORMATS, 0)
        totals = {policy: [0] * len(_LIVE) for policy in self._policies | {policy for policy, _ in sizes}}
        for policy, size in sizes:
            fronts[size.coding] += size.front_blocks
            of_one = size.entries, size.tokens, size.blocks * self._bytes_per_block, size.external_bytes
            for index, number in enumerate(of_one):
                totals[policy][index] += number
        for policy, numbers in totals.items():
            for gauge, number in zip(_LIVE, numbers, strict=True):
                gauge.labels(policy, self._engine).set(number)
        for coding, num_blocks in fronts.items():
            FRONT_BYTES.labels(FORMATS[coding], self._engine).set(num_blocks * self._bytes_per_block)
        self._policies = set(totals)

    def update_contexts(self, num_shared: int, num_shared_blocks: int, num_kept: int, num_kept_blocks: int) -> None:
        """Sets numbers of compressed contexts in the prefix cache, and of their blocks; and of those that are kept."""
        size = self._bytes_per_block
        numbers = num_shared, num_shared_blocks * size, num_kept, num_kept_blocks * size
        for gauge, number in zip(_CONTEXTS, numbers, strict=True):
            gauge.labels(self._engine).set(number)
