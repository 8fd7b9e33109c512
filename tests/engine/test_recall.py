"""The demo model recalls facts, and compression costs what one would expect."""

import numpy as np

from vllm_kvmerge.demo import recall
from vllm_kvmerge.demo.evaluate import evaluate
from vllm_kvmerge.policies import PRESETS


def test_recall_on_fresh_prompts(engine):
    rng = np.random.default_rng()
    prompts = [recall.draw_prompt(rng, 1024, 16) for _ in range(80)]
    scores = {s.policy: s for s in evaluate(engine.llm, prompts, ["full", "snapkv", "keepkv", "h2o", "local"], 0.3)}
    assert scores["full"].exact >= 0.95
    assert scores["snapkv"].exact >= 0.85
    assert scores["local"].exact < 0.6  # it has forgotten two facts in three
    assert scores["keepkv"].digits > scores["h2o"].digits  # merging keeps more than dropping


STRONG = {"adakv", "criticalkv", "grkv", "keydiff", "pyramidkv", "rkv", "snapkv", "tova"}
"""Policies that this task suits: it asks for four digits, only the first of which has been attended to by then."""


def test_every_preset_end_to_end(engine):
    rng = np.random.default_rng()
    prompts = [recall.draw_prompt(rng, 512, 8) for _ in range(30)]
    roomy = {s.policy: s for s in evaluate(engine.llm, prompts, ["full", *sorted(PRESETS)], 1.0)}
    full = roomy.pop("full")
    assert full.exact >= 0.85
    for score in roomy.values():
        assert (score.exact, score.digits) == (full.exact, full.digits), score.policy
    for score in evaluate(engine.llm, prompts, sorted(PRESETS), 0.3):
        if score.policy in STRONG:
            assert score.exact >= full.exact - 0.2, score
        else:
            assert score.exact <= full.exact - 0.2, score
            assert score.digits >= 0.15, score  # more than what guessing gives
