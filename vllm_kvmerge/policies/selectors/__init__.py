"""Selectors: which entries stay."""

from vllm_kvmerge.policies.selectors.heavy_hitter import HeavyHitter
from vllm_kvmerge.policies.selectors.recent import Recent
from vllm_kvmerge.policies.selectors.sink_recent import SinkRecent
from vllm_kvmerge.policies.selectors.window_topk import WindowTopK

__all__ = ["HeavyHitter", "Recent", "SinkRecent", "WindowTopK"]
