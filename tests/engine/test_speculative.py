"""N-gram speculative decoding beside compression: drafts change how fast tokens come, and nothing else."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.demo_model import BYTES_PER_BLOCK
from tests.engine.architectures import check_company_and_preemption, jobs
from tests.engine.conftest import (
    DEMO_FILES,
    NUM_BLOCKS,
    Engine,
    engine_arguments,
    engine_with,
    in_a_process,
    random_prompt,
    run,
)
from tests.engine.test_small_pool import POOL, small_pool
from tests.engine.test_tensor_parallel import NUM_TOKENS, generate
from vllm_kvmerge import compression
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.request.proof import PROOFS_KEY

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_DRAFTS, BUDGET, INTERVAL, MAX_TOKENS = 4, 64, 16, 60
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,  # so that drafts are often wrong
}
DRAFTING = {"speculative_config": SPECULATION, "per_request_spec_decode_metrics": "detailed"}
PROGRAM = "from tests.engine import test_speculative; test_speculative.answer_on_stock_vllm()"


def arguments() -> dict[str, Any]:
    return engine_arguments() | {"kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK} | DRAFTING


THREADS = {"NUMBA_THREADING_LAYER": "workqueue"}
"""Numba, with which vLLM looks drafts up, would otherwise change the number of PyTorch's threads."""


@contextmanager
def with_drafts() -> Iterator[None]:
    """An engine of this process may look drafts up meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in THREADS.items():
            patch.setenv(name, value)
        forget_numba()
        try:
            yield
        finally:
            forget_numba()


def forget_numba() -> None:
    """vLLM's workers look through all modules when they begin, and fail over one that Numba has imported."""
    sys.modules.pop("llvmlite.binding.ffi", None)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    # Answers are compared with stock vLLM's.
    own = {"kvmerge": DEMO_FILES | {"plain_attention": "vllm"}}
    with with_drafts(), engine_with(**arguments(), additional_config=own) as engine:
        yield engine


def repetitive(seed: int, length: int) -> list[int]:
    """A text of a few phrases, which recur with changes: some n-grams go on as before, some do not."""
    rng = np.random.default_rng(seed)
    phrases = rng.integers(19, 780, (4, 12))
    text = phrases[rng.integers(0, 4, length // 12 + 1)].flatten()
    changed = rng.random(len(text)) < 0.05
    text[changed] = rng.integers(19, 780, int(changed.sum()))
    return [2, *text[: length - 1].tolist()]


def repeating(jobs: list[tuple[list[int], SamplingParams]]) -> list[tuple[list[int], SamplingParams]]:
    """Requests like these, whose prompts are ``repetitive``."""
    return [(repetitive(index, len(prompt)), asked) for index, (prompt, asked) in enumerate(jobs)]


WITHIN_ITS_BUDGET_FIRST = {"policy": "h2o", "budget": 240, "interval": 30}
MORE: list[dict[str, Any]] = [
    WITHIN_ITS_BUDGET_FIRST,
    {"policy": "morphkv", "refresh": {"every": 24}, "context_tokens": 120},
    {"policy": "kvzap", "window_size": 32, "decode": "bounded"},
    {"policy": "streaming_llm", "positions": "cache"},
    {"policy": "snapkv", "reuse": "turns"},
]
"""Fields of requests that differ in what their tokens leave behind, beside those of ``jobs``."""


def params(fields: dict[str, Any] | None = None, **others: Any) -> SamplingParams:
    extra = {USAGE_KEY: True} if fields is not None else {}
    if fields:
        extra |= compression(**{"budget": BUDGET, "interval": INTERVAL} | fields)
    sampling = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True} | others
    return SamplingParams(extra_args=extra or None, **sampling)


SAMPLINGS: list[dict[str, Any]] = [{}, {"logprobs": 2, "repetition_penalty": 1.1}]
"""Stock vLLM on a CPU verifies drafts of requests with a temperature by what lies in memory (``compat``)."""

PLAIN = [[random_prompt(np.random.default_rng(1), length), repetitive(2, length)] for length in (40, 200, 1500)]


def plain_answers(llm: Any) -> list[Any]:
    """Tokens, and numbers of drafts of each step with some, of requests without a policy."""
    answers = []
    for asked, texts in product(SAMPLINGS, PLAIN):
        outputs = llm.generate([{"prompt_token_ids": one} for one in texts], params(**asked), use_tqdm=False)
        for one in (one for output in outputs for one in output.outputs):
            metrics = one.spec_decode_metrics
            drafts = metrics and [metrics.per_step_drafted, metrics.per_step_accepted]
            answers.append([list(one.token_ids), drafts])
    return answers


def answer_on_stock_vllm() -> None:
    """The program of a process into which no plugin is loaded."""
    from vllm import LLM

    json.load(sys.stdin)
    print("FOUND", json.dumps(plain_answers(LLM(**arguments()))))


def numbers(outputs: list[Any]) -> tuple[int, int]:
    """Drafts of requests that have ended, and how many were accepted."""
    found = [one.spec_decode_metrics for output in outputs for one in output.outputs]
    return sum(sum(one.per_step_drafted) for one in found), sum(sum(one.per_step_accepted) for one in found)


def test_plain_requests_equal_stock_vllm_with_the_same_drafts(engine):
    """Draft for draft, so that nothing is slower."""
    assert engine.llm.reset_prefix_cache()
    found = plain_answers(engine.llm)
    assert found == in_a_process(["-c", PROGRAM], None, is_stock=True, **THREADS)
    drafted, accepted = (sum(sum(drafts[i]) for _, drafts in found) for i in range(2))
    assert 0 < accepted < drafted
    engine.assert_empty()


def test_requests_of_every_kind(engine, monkeypatch):
    """Beside each other, alone, preempted and without drafts; they hold as much but for what the last drafts would have
    added."""
    told = [
        *repeating(jobs(engine)),
        *((repetitive(seed, 150 + 13 * seed), params(one)) for seed, one in enumerate(MORE)),
    ]
    tokens, reports = check_company_and_preemption(engine, told), []
    texts, asked = [text for text, _ in told], [one for _, one in told]
    for one in asked:
        one.extra_args = (one.extra_args or {}) | {USAGE_KEY: True}
    for _ in range(2):
        assert engine.llm.reset_prefix_cache()
        outputs = engine.generate(texts, asked)
        assert [list(output.outputs[0].token_ids) for output in outputs] == tokens
        reports.append([output.kv_transfer_params[REPORT_KEY] for output in outputs])
        monkeypatch.setattr(engine.scheduler, "_draft_end", lambda request: 0)
    assert numbers(outputs) == (0, 0)
    for found, expected in zip(*reports, strict=True):
        assert found["compressions"] == expected["compressions"]
        assert found.get("refreshes") == expected.get("refreshes")
        assert 0 <= expected["peak_entries"] - found["peak_entries"] <= NUM_DRAFTS
    engine.assert_empty()


USED = {"morphkv": (), "weightedkv": ("scores", "aux"), "keepkv": ("scores", "aux")}
"""Statistics in the cache that a policy uses, if not scores alone; others hold whatever was there."""


def statistics_of(engine: Engine, request_id: str, policy: str) -> list[dict[str, torch.Tensor]]:
    """Statistics and positions of a request's front, in each layer."""
    segments, row = engine.segments[request_id], engine.manager.req_to_blocks[request_id]
    blocks = [block.block_id for block in row[: -(-segments.front // engine.scheduler.block_size)]]
    planes = (*USED.get(policy, ("scores",)), "positions")
    return [
        {plane: getattr(layer, plane)[blocks].transpose(0, 1).flatten(1)[:, : segments.front] for plane in planes}
        for layer in engine.compression.compactor.layers
    ]


def fronts(engine: Engine, fields: dict[str, Any], prompt: list[int]) -> dict[int, list[dict[str, torch.Tensor]]]:
    """The front of a request after each compression, by the number of tokens computed then."""
    found = {}
    engine.add("watched", prompt, params(fields))

    def watch() -> None:
        for request_id, segments in engine.segments.items():
            if segments.changed_at not in found:
                found[segments.changed_at] = statistics_of(engine, request_id, fields["policy"])

    run(engine, watch)
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": "h2o"},
        {"policy": "weightedkv", "score_window": "all"},
        {"policy": "keepkv"},
        {"policy": "tova"},
        {"policy": "morphkv"},
        {"policy": "kvzap", "window_size": 32, "decode": "bounded"},
        {"policy": "h2o", "budget": 230, "interval": 20},
        {"policy": "snapkv", "budget": 230, "interval": 20, "decode": "bounded"},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_rejected_drafts_leave_no_trace_in_statistics(engine, monkeypatch, fields):
    prompt = repetitive(1, 220)
    assert engine.llm.reset_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "_draft_end", lambda request: 0)
        expected = fronts(engine, fields, prompt)
    (output,) = engine.generate([prompt], params(fields))
    drafted, accepted = numbers([output])
    assert 0 < accepted < drafted
    (told,) = output.kv_transfer_params[PROOFS_KEY]
    assert told["tokens"] == len(prompt) + len(output.outputs[0].token_ids) - 1  # drafts are counted once
    assert engine.llm.reset_prefix_cache()
    found = fronts(engine, fields, prompt)
    assert_same(found, expected)
    engine.assert_empty()


def assert_same(found: dict[int, Any], expected: dict[int, Any]) -> None:
    """Of two results of ``fronts``, of more than one compression: the same tokens, with statistics alike."""
    assert list(found) == list(expected) and len(found) > 1
    for computed in found:
        for mine, theirs in zip(found[computed], expected[computed], strict=True):
            assert torch.equal(mine["positions"], theirs["positions"])
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": "h2o", "trigger": "pressure"},
        {"policy": "h2o", "reuse": "turns"},
        {"policy": "kvzap", "reuse": "turns", "window_size": 32, "decode": "bounded"},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_requests_without_drafts(engine, fields):
    """Beside others that have some."""
    texts = [repetitive(seed, 200) for seed in range(4)]
    asked = [params(fields), params({"policy": "streaming_llm"}), params(fields), params()]
    outputs = engine.generate(texts, asked)
    assert [numbers([output])[0] > 0 for output in outputs] == [False, True, False, True]
    engine.assert_empty()


def test_two_workers_equal_one(engine, tmp_path):
    """Each finds the same drafts, and verifies the same tokens."""
    fields = [{"policy": "h2o"}, {"policy": "keepkv"}, {"policy": "morphkv"}, WITHIN_ITS_BUDGET_FIRST]
    asked = [params(one, max_tokens=NUM_TOKENS) for one in fields]
    texts = [repetitive(seed, 210) for seed in range(len(asked))]
    told = [(text, one.extra_args) for text, one in zip(texts, asked, strict=True)]
    together, _ = generate(tmp_path, arguments(), told)
    assert together == engine.tokens(texts, asked)


def test_turns_are_found_after_drafts(engine):
    """What a request leaves, cut at a stop among its drafts, is what it leaves without drafts."""
    prompt, fields = repetitive(5, 300), {"policy": "streaming_llm", "reuse": "turns"}
    (whole,) = engine.tokens([prompt], params(fields))
    for stop in dict.fromkeys(whole[20:]):
        asked = params(fields, stop_token_ids=[stop])
        with engine.sharing_contexts():
            (said,) = engine.tokens([prompt], asked)
            asks = [*prompt, *said, *repetitive(6, 40)]
            (first,) = engine.generate([asks], params(fields))
            assert first.num_cached_tokens == len(prompt) + len(said) - 1
        (again,) = engine.tokens([prompt], asked)
        assert said == again


def test_the_prefix_cache_is_unharmed(engine):
    prompt = repetitive(9, 400)
    assert engine.llm.reset_prefix_cache()
    (expected,) = engine.tokens([prompt], params())
    assert engine.llm.reset_prefix_cache()
    for fields in ({"policy": "keepkv"}, {"policy": "streaming_llm", "decode": "bounded"}, None):
        (output,) = engine.generate([prompt], params(fields))
        assert fields is None or list(output.outputs[0].token_ids) != expected
    assert list(output.outputs[0].token_ids) == expected and output.num_cached_tokens >= 320
    engine.assert_empty()


def test_sampling(engine):
    """Drafts are verified as the request samples; with a seed, each time alike."""
    for fields in (None, {"policy": "keepkv"}):
        prompt = repetitive(3, 230)
        (greedy,) = engine.tokens([prompt], params(fields))
        for more in ({}, {"top_k": 5}, {"top_p": 0.9, "seed": 1}, *([{"n": 3, "seed": 1}] if fields else [])):
            (output,) = engine.generate([prompt], params(fields, temperature=0.01, **more))  # all but greedy
            assert {tuple(one.token_ids) for one in output.outputs} == {tuple(greedy)} and numbers([output])[1] > 0
        asked = params(fields, temperature=1.5, seed=3, top_k=50)
        first, again = (engine.tokens([prompt], asked)[0] for _ in range(2))
        assert first == again != greedy
    engine.assert_empty()


def test_drafts_find_room_in_a_small_pool(engine):
    """Behind a request's last token there is none."""
    prompt, preemptions = repetitive(4, POOL - 40), []
    with small_pool(engine):
        engine.llm.llm_engine.add_request("0", {"prompt_token_ids": prompt}, params(max_tokens=200))
        requests = list(engine.scheduler.requests.values())
        tokens = run(engine, lambda: preemptions.extend(one.num_preemptions for one in requests))
    assert len(tokens["0"]) == 40 and not any(preemptions)
    assert len(preemptions) < 35, "no drafts were right"
