"""The report of what a request's cache held."""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.demo_model import BLOCK_SIZE, BYTES_PER_BLOCK
from tests.engine.conftest import random_prompt
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.policies.base import ServedModel
from vllm_kvmerge.request.proof import PROOFS_KEY
from vllm_kvmerge.request.spec import compression


def params(policy: str, max_tokens: int, asks: bool = True, **parameters) -> SamplingParams:
    extra = {**compression(policy, **parameters), **({USAGE_KEY: True} if asks else {})}
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def sizes(fronts: list[int], tails: list[int], starts: list[int]) -> tuple[float, float]:
    """Mean entries and bytes of steps with these many compressed entries, followed by slots ``start`` to ``tail``."""
    front, tail, start = map(np.array, (fronts, tails, starts))
    blocks = -(-front // BLOCK_SIZE) + -(-tail // BLOCK_SIZE) - start // BLOCK_SIZE
    return np.mean(front + tail - start), np.mean(blocks) * BYTES_PER_BLOCK


def test_reports(engine):
    rng = np.random.default_rng()
    prompts = [random_prompt(rng, length) for length in (3000, 320, 320, 320)]
    asked = [
        params("full", 20),
        params("h2o", 70, budget=96, interval=32),
        params("adakv", 5, budget=64),
        params("h2o", 5, asks=False, budget=96),
    ]
    full, bounded, uneven, silent = [output.kv_transfer_params for output in engine.generate(prompts, asked)]
    assert silent.keys() == {PROOFS_KEY}
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
    # Room for the average of the heads' shares, not for the largest.
    report = uneven[REPORT_KEY]
    expected = sizes([64] * 5, list(range(320, 325)), [320] * 5)
    assert (report["mean_entries"], report["mean_bytes"]) == pytest.approx(expected)
    engine.assert_empty()


def test_the_report_says_what_was_used(engine, monkeypatch):
    """The ridge follows the model's type, from admission to the worker, unless the request gives it."""
    prompt = random_prompt(np.random.default_rng(1), 250)

    def answer(ridge: float, **fields) -> float:
        asked = params("grkv", 6, budget=64, **fields)
        asked.logprobs = 0
        engine.llm.reset_prefix_cache()  # chunks of another size round otherwise
        (output,) = engine.generate([prompt], [asked])
        used = {"policy": "grkv", "budget": 64, "selector": "snapkv", "lambda_k": ridge, "lambda_v": ridge}
        assert used.items() <= output.kv_transfer_params[REPORT_KEY]["kv_compression"].items()
        return output.outputs[0].cumulative_logprob

    by_default = answer(0.01)
    monkeypatch.setattr(engine.scheduler._admission, "_model", ServedModel("qwen3"))
    assert answer(0.1) == answer(0.1, lambda_k=0.1, lambda_v=0.1) != by_default
    assert answer(0.01, lambda_k=0.01, lambda_v=0.01) == by_default
    (plain,) = engine.generate([prompt], [params("full", 2)])
    assert plain.kv_transfer_params[REPORT_KEY]["kv_compression"] == {"policy": "full"}
    engine.assert_empty()
