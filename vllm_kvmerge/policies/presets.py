"""Presets of the papers' methods, each a tracker, a selector, a merger and, if not uniform, an allocator.

Scores start from the last ``score_window`` queries of the prompt; H2O scores all of them, as ``score_window: "all"``
does.
"""

from typing import Any

from vllm_kvmerge.policies.fields import DecodeMode
from vllm_kvmerge.policies.registry import Preset, register_preset

WINDOW: dict[str, Any] = {"decode": "grow", "score_window": 32, "window_size": 32}
"""SnapKV: the queries of the observation window vote, once."""

VOTES: dict[str, Any] = {"score_window": 32, "window_size": 32}
"""The same, again while the request generates. KeepKV, ZSMerge, WeightedKV, D2O and KVMerger rank entries by attention
summed over all queries, as H2O does; what that keeps of a prompt does not hold what a real language model is asked for,
whatever is merged into it (docs/quality.md). So their presets merge into SnapKV's selection; the papers' own are in
docs/policies.md."""

PYRAMIDINFER: dict[str, Any] = {"shape": "cosine", "ratio": 2.65, "recent_share": 0.26}
"""The released configuration (``prefill_decay_ratio`` 0.9, ``recent_ratio`` 0.2) leaves all of the prompt in the first
of 32 layers and 0.38 of it in the last, with a recent fifth of it in each, which is 0.26 of their mean."""


def _register(name: str, source: str, parts: str, decode: DecodeMode = "bounded", **defaults: Any) -> None:
    """``parts``: tracker, selector, merger and perhaps allocator."""
    tracker, selector, merger, allocator = (*parts.split(), "uniform")[:4]
    register_preset(Preset(name, source, tracker, selector, merger, allocator, decode, defaults))


_register("local", "Sliding window: the newest entries", "none local drop")
_register("streaming_llm", "StreamingLLM, Xiao et al., arXiv:2309.17453", "none streaming_llm drop")
# H2O protects no first tokens: num_sink_tokens 0 is the paper's. Attention finds them by itself, so its scores of few
# queries are what may lose them.
_register("h2o", "H2O, Zhang et al., arXiv:2306.14048", "sum h2o drop")
_register("snapkv", "SnapKV, Li et al., arXiv:2404.14469", "sum snapkv drop", **WINDOW)
_register(
    "chunkkv", "ChunkKV, Liu et al., arXiv:2502.00299", "sum snapkv drop", **WINDOW, kernel_size=1, chunk_length=10
)
# The paper leaves the selection free; its experiments took PyramidInfer's.
_register("keepkv", "KeepKV, Tian et al., arXiv:2504.09936", "log_ema snapkv zip", **VOTES)
_register("zsmerge", "ZSMerge, Liu, Liu and Tang, arXiv:2503.10714", "sum snapkv residual", **VOTES, decay=0.98)
_register("weightedkv", "WeightedKV, Yuan et al., arXiv:2503.01330", "mean snapkv neighbour_value", **VOTES)
_register("morphkv", "MorphKV, Ghadia et al., arXiv:2503.00979", "none morphkv drop")
_register("criticalkv", "CriticalKV, Feng et al., arXiv:2502.03805", "sum criticalkv drop", **WINDOW)
_register("grkv", "GRKV, Peng et al., arXiv:2605.31105", "sum snapkv regression", **WINDOW)
# Scores are those of the newest query alone.
_register("tova", "TOVA, Oren et al., arXiv:2401.06104", "sum tova drop", score_window=1, decay=0.0)
_register("random", "Control: a uniformly random sample", "none random drop")
_register("knorm", "L2 norm, Devoto et al., arXiv:2406.11430", "none knorm drop")
_register("keydiff", "KeyDiff, Park et al., arXiv:2504.15364", "none keydiff drop")
# R-KV scores the last 8 queries; decaying by 7/8 weighs about as many.
_register("rkv", "R-KV, Cai et al., arXiv:2505.24133", "sum rkv drop", score_window=8, decay=0.875)
# What leaves the sliding window behind the sinks is merged, as in the source's code for generation.
_register("cam", "CaM, Zhang et al., ICML 2024", "sum streaming_llm cam")
# The source's code never compresses layers 0, 1 and the last. Here all share the budget: a layer that keeps everything
# keeps everybody's blocks.
_register("d2o", "D2O, Wan et al., arXiv:2406.13035", "sum snapkv d2o variance", **VOTES)
_register("kvmerger", "KVMerger, Wang et al., arXiv:2407.08454", "sum snapkv kvmerger", **VOTES)
# The source keeps no recent window, but scores of few queries must not merge the newest entries first.
_register("asymkv", "AsymKV, Cui and Xu, arXiv:2506.05410", "sum h2o asymkv", recent_share=0.25)
_register("pyramidkv", "PyramidKV, Cai et al., arXiv:2406.02069", "sum snapkv drop pyramid", **WINDOW)
# The source ranks a layer's tokens for all heads together, and deeper layers never compute one that it drops. Here
# all of the prompt is computed and each head of each layer ranks its own, so that no choice is nested.
_register("pyramidinfer", "PyramidInfer, Yang et al., arXiv:2405.12532", "sum h2o drop pyramid", **PYRAMIDINFER)
_register("expected_attention", "Expected Attention, Devoto et al., arXiv:2510.00636", "none expected_attention drop")
# The source prunes every 128 tokens; an ``interval`` does.
_register("triattention", "TriAttention, Mao et al., arXiv:2604.04921", "none triattention drop")
# The source compresses prompts alone.
_register("compactor", "Compactor, Chari and Van Durme, arXiv:2507.08143", "none compactor drop", decode="grow")
_register("fused", "Best rank by two selectors", "none fused drop adaptive")
_register("adakv", "Ada-KV, Feng et al., arXiv:2407.11550", "sum snapkv drop adaptive", **WINDOW)
# Each head keeps its newest entry too, from which generation goes on.
_register("kvzip", "KVzip, Kim et al., arXiv:2505.23416", "reconstruction top_scores drop global", decode="grow")
# Heads get budgets by KVzip's scores from one reading, and keep entries of the best rank by them or by their values.
ONCE: dict[str, Any] = {"of": ["top_scores", "value_leverage"], "floor_share": 0.2}
_register("kvzip_once", "KVzip's scores from one reading, and values", "lookahead fused drop global", "grow", **ONCE)
# Heads get what they got of KVzip's scores when the model was calibrated.
_register("calibrated", "KVzip's budgets of heads, KeyDiff's ranking", "none keydiff drop calibrated", before_rope=True)
# The source evicts by a threshold alone: budget {"threshold": 0.018, ...} is its ln t = -4. Scores are not pooled.
_register("kvzap", "KVzap, arXiv:2601.07891", "predicted snapkv drop global", window_size=128, kernel_size=1)
