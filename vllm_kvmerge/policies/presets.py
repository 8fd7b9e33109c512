"""The papers' methods, each as a tracker, a selector and a merger.

Scores start from the last ``score_window`` queries of the prompt; the papers of H2O and ZSMerge score all of them,
which a request gets with ``score_window: "all"``.
"""

from vllm_kvmerge.policies.mergers import DropMerger, ResidualMerger, ZipMerger
from vllm_kvmerge.policies.registry import Preset, register_preset
from vllm_kvmerge.policies.selectors import HeavyHitter, Recent, SinkRecent, WindowTopK
from vllm_kvmerge.policies.trackers import LogEmaTracker, NoTracker, SumTracker

register_preset(Preset("local", "Sliding window: the newest entries", NoTracker, Recent, DropMerger))

register_preset(
    Preset("streaming_llm", "StreamingLLM, Xiao et al., arXiv:2309.17453", NoTracker, SinkRecent, DropMerger)
)

register_preset(Preset("h2o", "H2O, Zhang et al., arXiv:2306.14048", SumTracker, HeavyHitter, DropMerger))

register_preset(
    Preset(
        "snapkv",
        "SnapKV, Li et al., arXiv:2404.14469",
        SumTracker,
        WindowTopK,
        DropMerger,
        decode="grow",
        # The queries that vote are those of the observation window.
        defaults={"score_window": 32, "window_size": 32},
    )
)

register_preset(Preset("keepkv", "KeepKV, Tian et al., arXiv:2504.09936", LogEmaTracker, HeavyHitter, ZipMerger))

register_preset(
    Preset(
        "zsmerge",
        "ZSMerge, Liu, Liu and Tang, arXiv:2503.10714",
        SumTracker,
        HeavyHitter,
        ResidualMerger,
        defaults={"decay": 0.98, "num_sink_tokens": 0, "recent_share": 0.25},
    )
)
