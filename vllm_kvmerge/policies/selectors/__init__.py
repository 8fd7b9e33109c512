"""Selectors: which entries stay."""

from vllm_kvmerge.policies.selectors.critical import Critical
from vllm_kvmerge.policies.selectors.heavy_hitter import HeavyHitter
from vllm_kvmerge.policies.selectors.keydiff import KeyDiff
from vllm_kvmerge.policies.selectors.knorm import KeyNorm
from vllm_kvmerge.policies.selectors.random_keep import RandomKeep
from vllm_kvmerge.policies.selectors.recent import Recent
from vllm_kvmerge.policies.selectors.recent_queries import RecentQueries
from vllm_kvmerge.policies.selectors.rkv import RedundancyAware
from vllm_kvmerge.policies.selectors.sink_recent import SinkRecent
from vllm_kvmerge.policies.selectors.tova import Tova
from vllm_kvmerge.policies.selectors.window_topk import WindowTopK

__all__ = [
    "Critical",
    "HeavyHitter",
    "KeyDiff",
    "KeyNorm",
    "RandomKeep",
    "Recent",
    "RecentQueries",
    "RedundancyAware",
    "SinkRecent",
    "Tova",
    "WindowTopK",
]
