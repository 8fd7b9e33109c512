"""Selectors: choose the entries that stay."""

from vllm_kvmerge.policies.selectors.critical import Critical as Critical
from vllm_kvmerge.policies.selectors.expected_attention import ExpectedAttention as ExpectedAttention
from vllm_kvmerge.policies.selectors.fused import Fused as Fused
from vllm_kvmerge.policies.selectors.heavy_hitter import HeavyHitter as HeavyHitter
from vllm_kvmerge.policies.selectors.keydiff import KeyDiff as KeyDiff
from vllm_kvmerge.policies.selectors.knorm import KeyNorm as KeyNorm
from vllm_kvmerge.policies.selectors.leverage import Leverage as Leverage
from vllm_kvmerge.policies.selectors.random_keep import RandomKeep as RandomKeep
from vllm_kvmerge.policies.selectors.recent import Recent as Recent
from vllm_kvmerge.policies.selectors.recent_queries import RecentQueries as RecentQueries
from vllm_kvmerge.policies.selectors.rkv import RedundancyAware as RedundancyAware
from vllm_kvmerge.policies.selectors.sink_recent import SinkRecent as SinkRecent
from vllm_kvmerge.policies.selectors.top_scores import TopScores as TopScores
from vllm_kvmerge.policies.selectors.tova import Tova as Tova
from vllm_kvmerge.policies.selectors.triattention import TriAttention as TriAttention
from vllm_kvmerge.policies.selectors.window_topk import WindowTopK as WindowTopK
