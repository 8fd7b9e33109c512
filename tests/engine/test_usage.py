"""The report of what a request's cache held."""

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.demo_model import BLOCK_SIZE, BYTES_PER_BLOCK
from tests.engine.conftest import random_prompt
from vllm_kvmerge.engine.usage import REPORT_KEY, STREAM, USAGE_KEY
from vllm_kvmerge.request.parameters import compression
from vllm_kvmerge.request.proof import PROOFS_KEY


def params(policy: str, max_tokens: int, asks: bool | str = True, **parameters) -> SamplingParams:
    extra = {**compression(policy, **parameters), **({USAGE_KEY: asks} if asks else {})}
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
    assert len(engine.scheduler._accounts) == 0
    engine.assert_empty()


def test_the_report_says_what_was_used(engine, monkeypatch):
    """The ridge follows the model's type, from admission to the worker, unless the request gives it."""
    prompt = random_prompt(np.random.default_rng(1), 250)

    def answer(**fields) -> tuple[dict, list[float]]:
        asked = params("grkv", 6, budget=64, **fields)
        asked.logprobs = 0
        engine.llm.reset_prefix_cache()  # chunks of another size round otherwise
        (output,) = engine.generate([prompt], [asked])
        chosen = [next(iter(at.values())).logprob for at in output.outputs[0].logprobs]
        return output.kv_transfer_params[REPORT_KEY]["kv_compression"], chosen

    used, by_default = answer()
    assert (used["lambda_k"], used["lambda_v"]) == (0.01, 0.01)
    assert (used["policy"], used["budget"], used["selector"], used["window_size"]) == ("grkv", 64, "snapkv", 32)
    monkeypatch.setattr(engine.scheduler._model, "model_type", "qwen3")
    used, of_qwen = answer()
    assert (used["lambda_k"], used["lambda_v"]) == (0.1, 0.1)
    assert of_qwen == answer(lambda_k=0.1, lambda_v=0.1)[1] != by_default
    used, explicit = answer(lambda_k=0.01, lambda_v=0.01)
    assert (used["lambda_k"], used["lambda_v"]) == (0.01, 0.01) and explicit == by_default
    (plain,) = engine.generate([prompt], [params("full", 2)])
    assert plain.kv_transfer_params[REPORT_KEY]["kv_compression"] == {"policy": "full"}
    engine.assert_empty()


def test_an_aborted_request_leaves_nothing(engine):
    core = engine.llm.llm_engine
    core.add_request("aborted", {"prompt_token_ids": random_prompt(np.random.default_rng(), 100)}, params("full", 50))
    core.step()
    assert len(engine.scheduler._accounts) == 1
    core.abort_request(["aborted"])
    while core.has_unfinished_requests():
        core.step()
    assert len(engine.scheduler._accounts) == 0
    engine.assert_empty()


def test_steps_are_reported_while_requests_run(engine):
    """Three at once: each says what it holds itself, and one that does not ask says nothing."""
    prompts = {name: random_prompt(np.random.default_rng(), 1500) for name in ("bounded", "full", "silent")}
    asked = {
        "bounded": params("h2o", 70, asks=STREAM, budget=96, interval=32),
        "full": params("full", 30, asks=STREAM),
        "silent": params("h2o", 30, asks=False, budget=96),
    }
    core = engine.llm.llm_engine
    for name, prompt in prompts.items():
        asked[name].output_kind = RequestOutputKind.DELTA
        core.add_request(name, {"prompt_token_ids": prompt}, asked[name])
    steps: dict[str, dict[int, dict]] = {"bounded": {}, "full": {}}
    num_outputs = dict.fromkeys(prompts, 0)
    final = {}
    while core.has_unfinished_requests():
        for output in core.step():
            num_outputs[output.request_id] += 1
            if output.request_id == "silent":
                assert (output.kv_transfer_params is None) == (not output.finished)
                continue
            report = output.kv_transfer_params[REPORT_KEY]
            assert ("mean_entries" in report) == output.finished
            steps[output.request_id] |= {step["step"]: step for step in report["steps"]}
            final[output.request_id] = report
    assert num_outputs == {"bounded": 70, "full": 30, "silent": 30}

    for name, count in (("bounded", 70), ("full", 30)):
        taken = [steps[name][number] for number in sorted(steps[name])]
        assert list(steps[name]) == list(range(1, len(taken) + 1))
        assert all(step["start"] <= step["end"] for step in taken)
        assert [step["end"] for step in taken] == sorted(step["end"] for step in taken)
        decoded = [step for step in taken if step["tokens"] >= 1500]
        assert [step["tokens"] for step in decoded] == list(range(1500, 1500 + count))
        assert len(taken) > len(decoded)  # the prompt takes several chunks
        for key in ("entries", "bytes"):
            assert np.mean([step[key] for step in decoded]) == pytest.approx(final[name][f"mean_{key}"])

    for step in steps["full"].values():
        assert (step["entries"], step["bytes"]) == (step["tokens"], -(-step["tokens"] // BLOCK_SIZE) * BYTES_PER_BLOCK)
        assert "before" not in step
    compressed = {step["tokens"]: step for step in steps["bounded"].values() if "before" in step}
    assert list(compressed) == [1500, 1532, 1564]
    assert compressed[1500]["before"] == {"entries": 1500, "bytes": 47 * BYTES_PER_BLOCK}
    assert [compressed[tokens]["before"]["entries"] for tokens in (1532, 1564)] == [128, 128]
    assert all(step["entries"] == 96 for step in compressed.values())
    # 96 entries are three blocks; the block that is being filled stays.
    assert [step["bytes"] for step in compressed.values()] == [4 * BYTES_PER_BLOCK] * 3
    assert len(engine.scheduler._accounts) == 0
    engine.assert_empty()
