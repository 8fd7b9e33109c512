"""The report of what a request's cache held."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.demo_model import BLOCK_SIZE, BYTES_PER_BLOCK
from tests.engine.conftest import random_prompt
from vllm_kvmerge.cache.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.config import compression


def params(policy: str, max_tokens: int, asks: bool = True, **parameters) -> SamplingParams:
    extra = {**compression(policy, **parameters), **({USAGE_KEY: True} if asks else {})}
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def sizes(fronts: list[int], tails: list[int], starts: list[int]) -> tuple[float, float]:
    """Mean entries and bytes of steps with these many compressed entries, followed by slots ``start`` to ``tail``."""
    entries = [front + tail - start for front, tail, start in zip(fronts, tails, starts, strict=True)]
    blocks = [
        -(-front // BLOCK_SIZE) + -(-tail // BLOCK_SIZE) - start // BLOCK_SIZE
        for front, tail, start in zip(fronts, tails, starts, strict=True)
    ]
    return float(np.mean(entries)), float(np.mean(blocks)) * BYTES_PER_BLOCK


def test_reports(engine):
    rng = np.random.default_rng()
    prompts = [random_prompt(rng, 3000), random_prompt(rng, 320), random_prompt(rng, 320), random_prompt(rng, 320)]
    asked = [
        params("full", 20),
        params("h2o", 70, budget=96, interval=32),
        params("adakv", 5, budget=64),
        params("h2o", 5, asks=False, budget=96),
    ]
    full, bounded, uneven, silent = [output.kv_transfer_params for output in engine.generate(prompts, asked)]
    assert silent is None
    report = full[REPORT_KEY]
    tails = list(range(3000, 3020))
    assert (report["mean_entries"], report["mean_bytes"]) == pytest.approx(sizes([0] * 20, tails, [0] * 20))
    assert (report["peak_entries"], report["peak_bytes"]) == (3019, 95 * BYTES_PER_BLOCK)
    # 96 entries after the prompt's 320 tokens, and again whenever 32 have gathered, in the step that brings the 32nd.
    report = bounded[REPORT_KEY]
    tails = list(range(320, 390))
    starts = [320 + (tail - 320) // 32 * 32 for tail in tails]
    assert (report["mean_entries"], report["mean_bytes"]) == pytest.approx(sizes([96] * 70, tails, starts))
    assert (report["peak_entries"], report["peak_bytes"]) == (320, 10 * BYTES_PER_BLOCK)
    # Room for the largest head's share, not for the average.
    assert uneven[REPORT_KEY]["mean_entries"] > 66
    assert engine.scheduler._usages == {}
    engine.assert_empty()


def test_an_aborted_request_leaves_nothing(engine):
    core = engine.llm.llm_engine
    core.add_request("aborted", {"prompt_token_ids": random_prompt(np.random.default_rng(), 100)}, params("full", 50))
    core.step()
    assert len(engine.scheduler._usages) == 1
    core.abort_request(["aborted"])
    while core.has_unfinished_requests():
        core.step()
    assert engine.scheduler._usages == {}
    engine.assert_empty()
