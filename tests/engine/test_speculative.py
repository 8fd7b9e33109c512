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
from tests.engine.architectures import check_company_and_preemption
from tests.engine.conftest import NUM_BLOCKS, Engine, engine_arguments, engine_with, in_a_process, random_prompt, run
from tests.engine.test_small_pool import POOL, small_pool
from tests.engine.test_tensor_parallel import NUM_TOKENS, generate
from tests.presets import SMALL
from vllm_kvmerge import compression, demo, kvmerge_engine_args
from vllm_kvmerge.engine.plan import attached_step
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.policies import PRESETS
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
PROGRAM = "from tests.engine import test_speculative; test_speculative.answer()"


def arguments(**others: Any) -> dict[str, Any]:
    return engine_arguments() | {"kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK} | others


def ours(**others: Any) -> dict[str, Any]:
    # Answers are compared with stock vLLM's.
    config = {"kvzap": demo.kvzap_path(), "plain_attention": "vllm"}
    return arguments(**others) | {"additional_config": {"kvmerge": config}}


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


@contextmanager
def running(**others: Any) -> Iterator[Engine]:
    with with_drafts(), engine_with(**ours(**others)) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(**DRAFTING) as engine:
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


VARIANTS: list[dict[str, Any]] = [
    {},
    {"context_tokens": 150},
    {"prefill": {"chunk": 70}},
    {"decode": "bounded"},
    {"refresh": {"every": 20}},
    {"positions": "cache"},
    {"reuse": "turns"},
]
NAMED: dict[str, dict[str, Any]] = {
    "uneven": {"policy": "snapkv", "allocator": "adaptive", "decode": "bounded"},
    "skipped": {"policy": "morphkv", "skip_layers": 1},
    "threshold": {"policy": "snapkv", "budget": {"threshold": 0.01, "max": 0.8}, "decode": "bounded"},
    "all queries": {"policy": "h2o", "score_window": "all"},
    "within its budget first": {"policy": "h2o", "budget": 240, "interval": 30},
    "kept queries": {"policy": "morphkv", "refresh": {"every": 24}, "context_tokens": 120},
    "predicted": {"policy": "kvzap", "window_size": 32, "decode": "bounded"},
    "in the cache's order": {"policy": "streaming_llm", "positions": "cache"},
    "in the cache's order, scored": {"policy": "h2o", "positions": "cache"},
}
"""Fields of requests that differ in what their tokens leave behind."""


def policies() -> dict[str, dict[str, Any]]:
    """Fields of requests by name: each policy, with one of ``VARIANTS`` if it goes with it."""
    found = {}
    for index, policy in enumerate(sorted(PRESETS)):
        fields = SMALL.get(policy, {}) | {"policy": policy}
        found[policy] = fields | VARIANTS[index % len(VARIANTS)]
        try:
            compression(**{"budget": BUDGET} | found[policy])
        except ValueError:
            found[policy] = fields
    return found


CASES = policies() | NAMED


def params(fields: dict[str, Any] | None = None, **others: Any) -> SamplingParams:
    extra = {USAGE_KEY: True} if fields is not None else {}
    if fields:
        extra |= compression(**{"budget": BUDGET, "interval": INTERVAL} | fields)
    sampling = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True} | others
    return SamplingParams(extra_args=extra or None, **sampling)


def prompts(name: str) -> list[list[int]]:
    return [repetitive(seed + len(name), 200 + 10 * seed) for seed in range(2)]


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


def answers(engine_or_llm: Any, fields: dict[str, Any], texts: list[list[int]]) -> list[Any]:
    """Tokens, and what the cache held, of requests with a policy."""
    outputs = engine_or_llm.generate([{"prompt_token_ids": one} for one in texts], params(fields), use_tqdm=False)
    held = ("compressions", "peak_entries", "refreshes")
    reports = [output.kv_transfer_params[REPORT_KEY] for output in outputs]
    return [
        [list(output.outputs[0].token_ids), {key: report.get(key) for key in held}]
        for output, report in zip(outputs, reports, strict=True)
    ]


def answer() -> None:
    """The program of another process: with stock vLLM and the same drafts, or with compression and without drafts."""
    from vllm import LLM

    if json.load(sys.stdin) == "stock":
        found: Any = plain_answers(LLM(**arguments(**DRAFTING)))
    else:
        llm = LLM(**kvmerge_engine_args(**ours()))
        found = {name: answers(llm, fields, prompts(name)) for name, fields in CASES.items()}
    print("FOUND", json.dumps(found))


def elsewhere(which: str) -> Any:
    return in_a_process(["-c", PROGRAM], which, is_stock=which == "stock", **THREADS)


@pytest.fixture(scope="module")
def without_drafts() -> Any:
    return elsewhere("ours")


def numbers(outputs: list[Any]) -> tuple[int, int]:
    """Drafts of requests that have ended, and how many were accepted."""
    found = [one.spec_decode_metrics for output in outputs for one in output.outputs]
    return sum(sum(one.per_step_drafted) for one in found), sum(sum(one.per_step_accepted) for one in found)


def test_plain_requests_equal_stock_vllm_with_the_same_drafts(engine):
    """Draft for draft, so that nothing is slower."""
    assert engine.llm.reset_prefix_cache()
    found, expected = plain_answers(engine.llm), elsewhere("stock")
    assert found == expected
    drafted, accepted = (sum(sum(drafts[i]) for _, drafts in found) for i in range(2))
    assert 0 < accepted < drafted
    engine.assert_empty()


@pytest.mark.parametrize("name", sorted(CASES))
def test_policies_give_the_tokens_that_they_give_without_drafts(engine, without_drafts, name):
    """And compress as often, and hold as much, but for what the last drafts of all would have added."""
    assert engine.llm.reset_prefix_cache()
    for (tokens, held), (expected, expected_held) in zip(
        answers(engine.llm, CASES[name], prompts(name)), without_drafts[name], strict=True
    ):
        assert tokens == expected
        missing = expected_held.pop("peak_entries") - held.pop("peak_entries")
        assert held == expected_held and 0 <= missing <= NUM_DRAFTS
    engine.assert_empty()


USED = {"morphkv": (), "weightedkv": ("scores", "aux"), "keepkv": ("scores", "aux")}
"""Statistics in the cache that a policy uses, if not scores alone; others hold whatever was there."""


def statistics_of(engine: Engine, request_id: str, policy: str) -> list[dict[str, torch.Tensor]]:
    """Statistics and positions of a request's front, in each layer."""
    segments, row = engine.manager.segments[request_id], engine.manager.req_to_blocks[request_id]
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
        for request_id, segments in engine.manager.segments.items():
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


def watch_schedule(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None, int, bool]]:
    """Of each step of a request that is compressed: tokens that it comes to, count at which the request is due, drafts,
    and whether it is compressed in this step."""
    schedule, seen = engine.scheduler.schedule, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        due = {one.request_id: engine.scheduler._next_compression(one) for one in engine.scheduler.running}
        output = schedule(*args, **kwargs)
        planned = {plan.request_id for plan in attached_step(output).plans}
        for request_id in output.num_scheduled_tokens.keys() & due.keys() & engine.scheduler._compressions.keys():
            computed = engine.scheduler.requests[request_id].num_computed_tokens
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            seen.append((computed, due[request_id], drafts, request_id in planned))
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", watched)
    return seen


def test_drafts_end_before_a_compression(engine, monkeypatch):
    seen = watch_schedule(engine, monkeypatch)
    for policy in ("h2o", "streaming_llm", "morphkv"):
        engine.generate([repetitive(seed, 150 + 7 * seed) for seed in range(4)], params({"policy": policy}))
    drafted = [(computed, due, drafts) for computed, due, drafts, _ in seen if drafts]
    assert all(computed < due for computed, due, _ in drafted if due is not None)
    assert not any(drafts for _, _, drafts, is_planned in seen if is_planned)
    assert all(computed == due for computed, due, _, is_planned in seen if is_planned)
    cut = [drafts for computed, due, drafts in drafted if computed == due - 1]
    assert min(cut) < NUM_DRAFTS == max(drafts for _, _, drafts in drafted)
    engine.assert_empty()


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


def test_beside_each_other_alone_and_preempted(engine):
    told = [(repetitive(seed, 150 + 13 * seed), params(fields)) for seed, fields in enumerate(CASES.values())]
    told += [(repetitive(seed, 100 + 31 * seed), params()) for seed in range(3)]
    check_company_and_preemption(engine, told)


def test_two_workers_equal_one(engine, tmp_path):
    """Each finds the same drafts, and verifies the same tokens."""
    asked = [
        params(CASES[name], max_tokens=NUM_TOKENS) for name in ("h2o", "keepkv", "morphkv", "within its budget first")
    ]
    texts = [repetitive(seed, 210) for seed in range(len(asked))]
    jobs = [(text, one.extra_args) for text, one in zip(texts, asked, strict=True)]
    together, _ = generate(tmp_path, arguments(**DRAFTING), jobs)
    assert together == engine.tokens(texts, asked)


def test_several_answers_to_one_prompt(engine):
    prompt = repetitive(3, 230)
    asked = {"policy": "keepkv"}
    (alone,) = engine.tokens([prompt], params(asked))
    (output,) = engine.generate([prompt], params(asked, n=3, temperature=0.01, seed=1))  # all but greedy
    assert [list(one.token_ids) for one in output.outputs] == [alone] * 3
    engine.assert_empty()


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
        for more in ({}, {"top_k": 5}, {"top_p": 0.9, "seed": 1}):
            (output,) = engine.generate([prompt], params(fields, temperature=0.01, **more))  # all but greedy
            assert list(output.outputs[0].token_ids) == greedy and numbers([output])[1] > 0
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
