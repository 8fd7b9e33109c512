"""A model of sliding-window layers beside full attention: these are compressed, those are vLLM's own."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.architectures import BLOCK_SIZE, BYTES_PER_BLOCK, POLICIES, greedy, num_taken, running
from tests.engine.conftest import Engine, random_prompt, run
from tests.engine.test_pressure import params as asleep
from tests.engine.test_pressure import watched
from tests.engine.test_repetition import PROMPTS, dense_scores, scores
from tests.random_model import WINDOW, write_gemma
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY

pytestmark = pytest.mark.engine

__all__ = ["scores", "watched"]  # fixtures


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[Engine]:
    with running(folder) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize(("length", "chunk_size"), [(500, 150), (267, 2000), (511, 300)])
def test_scores_of_a_repeated_context_are_those_of_a_dense_computation(engine, folder, scores, length, chunk_size):
    """A repetition begins with its parent's window. Beside a request that generates, 510 tokens of the last context
    would be computed after two steps, so that the window at its last block would be gone after the third."""
    prompt = random_prompt(np.random.default_rng(61), length + 20)
    fields = {"chunk_size": chunk_size, "num_prefix_tokens": 4, **PROMPTS}
    assert engine.llm.reset_prefix_cache()
    engine.add("other", random_prompt(np.random.default_rng(62), 20), greedy(max_tokens=60))
    engine.llm.llm_engine.step()
    engine.add("one", prompt, greedy("kvzip", budget=0.5, context_tokens=length, **fields))
    run(engine)
    (found,) = scores
    expected = dense_scores(prompt[:length], chunk_size, 4, PROMPTS, path=folder)
    assert (found - expected).abs().max() < 1e-4 * expected.max()
    engine.assert_empty()


def test_a_report_counts_the_blocks_of_all_layers(engine):
    assert engine.llm.reset_prefix_cache()
    params = greedy("keepkv", 40, budget=64)
    params.extra_args[USAGE_KEY] = True
    engine.add("one", random_prompt(np.random.default_rng(10), 500), params)
    taken, reports = [], []
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            reports.append(output.kv_transfer_params)
        taken.append(num_taken(engine))
    report = reports[-1][REPORT_KEY]
    assert report["mean_bytes"] == pytest.approx(np.mean(taken[1:-1]) * BYTES_PER_BLOCK, rel=0.05)
    # Chunks of 256 tokens: at most the prompt's blocks in one group, and a window and two chunks in the two others.
    assert 16 * BYTES_PER_BLOCK <= report["peak_bytes"] <= (16 + 2 * 16) * BYTES_PER_BLOCK
    assert max(taken[2:]) <= (64 + 40) // BLOCK_SIZE + 1 + 2 * (WINDOW // BLOCK_SIZE + 2)


@pytest.mark.thin(20)
@pytest.mark.parametrize("policy", [None, *sorted(set(POLICIES) - {"kvzip"})])
def test_under_pressure_requests_are_compressed_and_none_is_preempted(engine, watched, policy):
    """But for plain ones. There are 80 blocks for six requests of 100 tokens and 300 more, which take some 110."""
    prompts = [random_prompt(np.random.default_rng(seed), 100) for seed in range(6)]
    with engine.with_blocks(80):
        tokens = engine.tokens(prompts, asleep(policy, 300))
    engine.assert_empty()
    assert [len(one) for one in tokens] == [300] * 6
    preempted, compressed = map(bool, watched)
    assert (preempted, compressed) == (policy is None, policy is not None)
