"""The papers' methods, each as a tracker, a selector, a merger and, where it is not uniform, an allocator.

Scores start from the last ``score_window`` queries of the prompt; the papers of H2O and ZSMerge score all of them,
which a request gets with ``score_window: "all"``.
"""

from vllm_kvmerge.policies.registry import Preset, register_preset

register_preset(Preset("local", "Sliding window: the newest entries", "none", "local", "drop"))

register_preset(Preset("streaming_llm", "StreamingLLM, Xiao et al., arXiv:2309.17453", "none", "streaming_llm", "drop"))

register_preset(Preset("h2o", "H2O, Zhang et al., arXiv:2306.14048", "sum", "h2o", "drop"))

register_preset(
    Preset(
        "snapkv",
        "SnapKV, Li et al., arXiv:2404.14469",
        "sum",
        "snapkv",
        "drop",
        decode="grow",
        # The queries that vote are those of the observation window.
        defaults={"score_window": 32, "window_size": 32},
    )
)

# The paper allocates as PyramidInfer does. Evenly here: layers share their blocks, so that uneven budgets cost memory.
register_preset(Preset("keepkv", "KeepKV, Tian et al., arXiv:2504.09936", "log_ema", "h2o", "zip"))

register_preset(
    Preset(
        "zsmerge",
        "ZSMerge, Liu, Liu and Tang, arXiv:2503.10714",
        "sum",
        "h2o",
        "residual",
        defaults={"decay": 0.98, "num_sink_tokens": 0, "recent_share": 0.25},
    )
)

register_preset(Preset("weightedkv", "WeightedKV, Yuan et al., arXiv:2503.01330", "mean", "h2o", "neighbour_value"))

register_preset(Preset("morphkv", "MorphKV, Ghadia et al., arXiv:2503.00979", "none", "morphkv", "drop"))

register_preset(
    Preset(
        "criticalkv",
        "CriticalKV, Feng et al., arXiv:2502.03805",
        "sum",
        "criticalkv",
        "drop",
        decode="grow",
        defaults={"score_window": 32, "window_size": 32},
    )
)

register_preset(
    Preset(
        "grkv",
        "GRKV, Peng et al., arXiv:2605.31105",
        "sum",
        "snapkv",
        "regression",
        decode="grow",
        defaults={"score_window": 32, "window_size": 32},
    )
)

register_preset(
    Preset(
        "tova",
        "TOVA, Oren et al., arXiv:2401.06104",
        "sum",
        "tova",
        "drop",
        # The newest query alone.
        defaults={"score_window": 1, "decay": 0.0},
    )
)

register_preset(Preset("random", "Control: a uniformly random sample", "none", "random", "drop"))

register_preset(Preset("knorm", "L2 norm, Devoto et al., arXiv:2406.11430", "none", "knorm", "drop"))

register_preset(Preset("keydiff", "KeyDiff, Park et al., arXiv:2504.15364", "none", "keydiff", "drop"))

register_preset(
    Preset(
        "rkv",
        "R-KV, Cai et al., arXiv:2505.24133",
        "sum",
        "rkv",
        "drop",
        # R-KV scores the last 8 queries; decaying by 7/8 weighs about as many.
        defaults={"score_window": 8, "decay": 0.875},
    )
)

register_preset(Preset("cam", "CaM, Zhang et al., ICML 2024", "sum", "h2o", "cam"))

register_preset(Preset("d2o", "D2O, Wan et al., arXiv:2406.13035", "sum", "h2o", "d2o", allocator="variance"))

register_preset(Preset("kvmerger", "KVMerger, Wang et al., arXiv:2407.08454", "sum", "h2o", "kvmerger"))

register_preset(
    # The source keeps no recent window; merging the newest entries first is not what scores of few queries should do.
    Preset("asymkv", "AsymKV, Cui and Xu, arXiv:2506.05410", "sum", "h2o", "asymkv", defaults={"recent_share": 0.25})
)

register_preset(
    Preset(
        "pyramidkv",
        "PyramidKV, Cai et al., arXiv:2406.02069",
        "sum",
        "snapkv",
        "drop",
        allocator="pyramid",
        decode="grow",
        defaults={"score_window": 32, "window_size": 32},
    )
)

register_preset(
    Preset(
        "pyramidinfer",
        "PyramidInfer, Yang et al., arXiv:2405.12532",
        "sum",
        "h2o",
        "drop",
        allocator="pyramid",
        # Shares fall to a tenth, and a fifth of each is recent, as in the source's configurations.
        defaults={"shape": "cosine", "ratio": 10.0, "recent_share": 0.2},
    )
)

register_preset(
    Preset(
        "adakv",
        "Ada-KV, Feng et al., arXiv:2407.11550",
        "sum",
        "snapkv",
        "drop",
        allocator="adaptive",
        decode="grow",
        defaults={"score_window": 32, "window_size": 32},
    )
)
