"""A plugin that wants a name which is taken."""

from vllm_kvmerge.policies import Preset, register_preset

register_preset(Preset("h2o", "a test", "sum", "h2o", "drop"))
