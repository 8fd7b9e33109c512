"""Next-token loss through the engine, against the same model in Transformers."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.measures import continuation_loss
from vllm_kvmerge import demo
from vllm_kvmerge.demo import recall

pytestmark = pytest.mark.slow

PROMPT, LENGTH = 300, 380


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    rng = np.random.default_rng()
    return [recall.training_sample(rng, LENGTH, 6, 7)[0].tolist() for _ in range(4)]


def loss(engine, documents, policy, budget) -> np.ndarray:
    halves = [[d[:PROMPT] for d in documents], [d[PROMPT:] for d in documents]]
    return np.array(continuation_loss(engine.llm, *halves, policy, budget))


def test_loss_is_the_models(engine, documents):
    model = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        logits = model(torch.tensor(documents)).logits[:, PROMPT - 1 : -1]
    targets = torch.tensor(documents)[:, PROMPT:]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").numpy()
    assert np.abs(loss(engine, documents, "full", 0) - expected).max() < 1e-3
    # A budget for everything compresses nothing; a small one costs, and forgetting all but the newest costs more.
    roomy, small = loss(engine, documents, "keepkv", LENGTH), loss(engine, documents, "snapkv", 0.3)
    assert np.abs(roomy - expected).max() < 1e-3
    assert expected.mean() + 0.01 < small.mean() < loss(engine, documents, "local", 8).mean()
    engine.assert_empty()
