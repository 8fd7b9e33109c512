"""A plugin whose presets no request could use, but for one."""

from vllm_kvmerge.policies import Preset, register_preset

register_preset(Preset("no_such_part", "a test", "none", "newest", "drop"))
register_preset(Preset("no_scores", "a test", "none", "h2o", "drop"))
register_preset(Preset("no_such_parameter", "a test", "sum", "h2o", "drop", defaults={"windwo": 3}))
register_preset(Preset("bad_default", "a test", "sum", "h2o", "drop", defaults={"decay": 3.0}))
register_preset(Preset("sound", "a test", "sum", "h2o", "drop", defaults={"decay": 0.5}))
