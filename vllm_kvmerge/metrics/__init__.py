"""What is counted, under which Prometheus name.

The engine core, the workers and the API server each count what they see; with ``PROMETHEUS_MULTIPROC_DIR`` set (as
``vllm-kvmerge serve`` does) prometheus_client adds the processes up on the server's ``/metrics``.
"""

from collections import defaultdict

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("vllm:kvmerge_requests", "Requests received, by policy.", ["policy"])
REJECTED = Counter("vllm:kvmerge_rejected_requests", "Requests refused because of kv_compression.", ["reason"])
GENERATED = Counter("vllm:kvmerge_generation_tokens", "Tokens generated, by policy.", ["policy"])
COMPRESSIONS = Counter("vllm:kvmerge_compressions", "Compressions of a request's cache.", ["policy"])
BLOCKS_FREED = Counter("vllm:kvmerge_blocks_freed", "Blocks returned to the pool by compressions.", ["policy"])
BYTES_FREED = Counter("vllm:kvmerge_bytes_freed", "Bytes of those blocks, over all layers and ranks.", ["policy"])
MERGED = Counter("vllm:kvmerge_entries_merged", "Cache entries (per layer and KV head) merged into others.", ["policy"])
EVICTED = Counter("vllm:kvmerge_entries_evicted", "Cache entries (per layer and KV head) dropped.", ["policy"])
COMPACTION_SECONDS = Histogram(
    "vllm:kvmerge_compaction_seconds",
    "Seconds to compress one request's cache, all layers; an equal share where a step compresses several.",
    ["policy"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
_LIVE_ENTRIES = Gauge(
    "vllm:kvmerge_live_entries",
    "Entries per KV head and layer held by running requests.",
    ["policy"],
    multiprocess_mode="livesum",
)
_LIVE_BYTES = Gauge(
    "vllm:kvmerge_live_bytes", "Bytes of the blocks held by running requests.", ["policy"], multiprocess_mode="livesum"
)
_REPRESENTED_TOKENS = Gauge(
    "vllm:kvmerge_represented_tokens",
    "Tokens that the live entries of running requests stand for.",
    ["policy"],
    multiprocess_mode="livesum",
)


def count_request(policy: str) -> None:
    REQUESTS.labels(policy).inc()


def count_rejection(reason: str) -> None:
    """``reason``: a CompressionError's."""
    REJECTED.labels(reason).inc()


def count_generated(policy: str, num_tokens: int) -> None:
    GENERATED.labels(policy).inc(num_tokens)


def count_compression(policy: str, num_blocks_freed: int, num_bytes_freed: int) -> None:
    COMPRESSIONS.labels(policy).inc()
    BLOCKS_FREED.labels(policy).inc(num_blocks_freed)
    BYTES_FREED.labels(policy).inc(num_bytes_freed)


def count_entries(policy: str, num_merged: int, num_evicted: int) -> None:
    """One worker's share: its own KV heads, all layers."""
    MERGED.labels(policy).inc(num_merged)
    EVICTED.labels(policy).inc(num_evicted)


def observe_compaction(policy: str, seconds: float) -> None:
    COMPACTION_SECONDS.labels(policy).observe(seconds)


class CacheGauges:
    """Sizes of the running requests' caches, summed by policy."""

    def __init__(self, bytes_per_block: int) -> None:
        self._bytes_per_block = bytes_per_block
        self._policies: set[str] = set()

    def update(self, sizes: list[tuple[str, int, int, int]]) -> None:
        """``sizes``: (policy, live entries, represented tokens, blocks held) of each running request."""
        totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for policy, *values in sizes:
            totals[policy] = [total + value for total, value in zip(totals[policy], values, strict=True)]
        self._policies |= totals.keys()
        for policy in self._policies:
            entries, tokens, blocks = totals[policy]
            _LIVE_ENTRIES.labels(policy).set(entries)
            _REPRESENTED_TOKENS.labels(policy).set(tokens)
            _LIVE_BYTES.labels(policy).set(blocks * self._bytes_per_block)
