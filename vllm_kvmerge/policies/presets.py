"""The papers' methods, each as a tracker, a selector and a merger.

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
