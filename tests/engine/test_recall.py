"""The demo model recalls facts, and compression costs what one would expect."""

import numpy as np

from vllm_kvmerge.demo import recall
from vllm_kvmerge.demo.evaluate import evaluate


def test_recall_on_fresh_prompts(engine):
    rng = np.random.default_rng()
    prompts = [recall.draw_prompt(rng, 1024, 16) for _ in range(80)]
    scores = {s.policy: s for s in evaluate(engine.llm, prompts, ["full", "snapkv", "keepkv", "h2o", "local"], 0.3)}
    assert scores["full"].exact >= 0.95
    assert scores["snapkv"].exact >= 0.85
    assert scores["local"].exact < 0.6  # it has forgotten two facts in three
    assert scores["keepkv"].digits > scores["h2o"].digits  # merging keeps more than dropping
