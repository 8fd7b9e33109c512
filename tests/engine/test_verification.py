"""Answers that are verified: an internal request scores their tokens with the full cache."""

import json

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.reasoning import ReasoningParser
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus

from tests.engine.conftest import greedy, preempt_all, random_prompt, run
from vllm_kvmerge import demo
from vllm_kvmerge.engine.internal_requests import VerifyingRequest
from vllm_kvmerge.engine.verification import VERIFY_KEY, obstacle, repeats
from vllm_kvmerge.evaluation.backends import EngineBackend, Request
from vllm_kvmerge.evaluation.config import EngineOptions
from vllm_kvmerge.ops.coded import CODINGS

PROMPT = random_prompt(np.random.default_rng(1), 300)


def answered(engine, params: SamplingParams, prompt: list[int] = PROMPT, key: str = "key") -> list[int]:
    params.extra_args = (params.extra_args or {}) | {VERIFY_KEY: key}
    (tokens,) = engine.tokens([prompt], params)
    return tokens


def ask(
    engine,
    answer: list[int],
    key: str = "key",
    max_tokens: int = 4096,
    seconds: float = 60.0,
    may_evict: bool = False,
):
    asked = {"key": key, "answer": answer, "seconds": seconds, "max_tokens": max_tokens}
    asked |= {"may_evict": may_evict, "is_last": False}
    return engine.scheduler.verify(json.dumps(asked))


def step_until(engine, future) -> dict:
    """Steps the engine, which knows no user's request, until the result is there."""
    core = engine.llm.llm_engine.engine_core.engine_core
    while not future.done():
        assert core.scheduler.has_requests(), "nobody goes on with the verification"
        core.step()
    return json.loads(future.result(0))


def verified(engine, params: SamplingParams, answer: list[int] | None = None) -> dict:
    tokens = answered(engine, params)
    return step_until(engine, ask(engine, answer or tokens))


def test_scores_are_those_of_the_prompt_and_the_answer_as_one_prompt(engine):
    assert engine.llm.reset_prefix_cache()
    answer = answered(engine, greedy("snapkv", 40, budget=48))
    found = step_until(engine, ask(engine, answer))
    (output,) = engine.generate([PROMPT + answer], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    expected = output.prompt_logprobs[len(PROMPT) :]
    log_probs = [one[token].logprob for one, token in zip(expected, answer, strict=True)]
    torch.testing.assert_close(torch.tensor(found["log_probs"]), torch.tensor(log_probs), atol=1e-3, rtol=1e-3)
    ranks = [one[token].rank for one, token in zip(expected, answer, strict=True)]
    assert found["agrees"] == [rank == 1 for rank in ranks] and not all(found["agrees"]) and any(found["agrees"])
    # The prompt is in the prefix cache, but for its last block.
    assert len(answer) <= found["tokens"] < len(answer) + engine.manager.block_size + 1
    engine.assert_empty()


def test_the_full_cache_agrees_with_its_own_answer_and_not_with_another_token(engine):
    answer = answered(engine, greedy(max_tokens=70))  # more than a tile's
    assert all(step_until(engine, ask(engine, answer))["agrees"])
    changed = answer[:60] + [answer[60] ^ 1] + answer[61:]
    agrees = step_until(engine, ask(engine, changed))["agrees"]
    assert all(agrees[:60]) and not agrees[60]


@pytest.mark.parametrize("front", [None, *CODINGS])
def test_a_corrupted_front_lowers_the_agreement(engine, front):
    """As a fault of ours would: nobody else sees it."""
    fields = {"budget": 280, "decode": "grow", "front": front}
    sound = verified(engine, greedy("snapkv", 40, **fields))

    def corrupt() -> None:
        for request_id, segments in engine.segments.items():
            blocks = [one.block_id for one in engine.manager.req_to_blocks[request_id]]
            for layer in engine.compression.compactor.layers:
                values = layer.values if front is None else layer.coded(front).values
                with torch.inference_mode():
                    values[blocks[: segments.front // values.shape[2]]] *= -1

    params = greedy("snapkv", 40, **fields)
    params.extra_args |= {VERIFY_KEY: "key"}
    engine.add("corrupted", PROMPT, params)
    answer = run(engine, corrupt)["corrupted"]
    broken = step_until(engine, ask(engine, answer))
    assert sum(broken["agrees"]) < sum(sound["agrees"]) and sum(broken["log_probs"]) < sum(sound["log_probs"]) - 5


PROCESSED = {
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "bias": {"logit_bias": dict.fromkeys(range(20, 400), -4.0)},
    "allowed": {"allowed_token_ids": list(range(100, 160))},
    "least": {"min_tokens": 40, "stop_token_ids": list(range(100, 700)), "ignore_eos": False},
}


@pytest.mark.parametrize("how", PROCESSED)
def test_logits_are_processed_as_the_request_asks(engine, how):
    params = SamplingParams(temperature=0, max_tokens=40, **{"ignore_eos": True} | PROCESSED[how])
    answer = answered(engine, params)
    assert all(step_until(engine, ask(engine, answer))["agrees"])
    request, _ = engine.scheduler._verifications._known["key"]
    request.sampling_params = SamplingParams(temperature=0, max_tokens=40)
    assert not all(step_until(engine, ask(engine, answer))["agrees"]), "the parameters change nothing"


GRAMMAR = {"structured_outputs": StructuredOutputsParams(regex="((dada|gofo|duzi|pubo)[0-9]){17}")}
"""Every other token is a digit. The end is another one."""


def log_probs(answer) -> list[float]:
    """Those that vLLM has given with the answer."""
    return [one[token].logprob for token, one in zip(answer.token_ids, answer.logprobs, strict=True)]


def check_constrained(engine) -> list[int]:
    """The answer, whose log-probabilities are then vLLM's own."""
    params = SamplingParams(temperature=0, max_tokens=70, logprobs=0, extra_args={VERIFY_KEY: "key"}, **GRAMMAR)
    (output,) = engine.generate([PROMPT], params)
    (answer,) = output.outputs
    found = step_until(engine, ask(engine, list(answer.token_ids)))
    assert all(found["agrees"])
    assert found["log_probs"] == pytest.approx(log_probs(answer), abs=1e-3)
    return list(answer.token_ids)


def test_under_a_grammar(engine):
    answer = check_constrained(engine)
    assert len(answer) == 35
    request, _ = engine.scheduler._verifications._known["key"]
    engine.scheduler._verifications._known["key"] = request, None
    assert not any(step_until(engine, ask(engine, answer))["agrees"][:3]), "the grammar forbids nothing"


def test_a_grammar_begins_after_reasoning(engine, monkeypatch):
    free = answered(engine, greedy(max_tokens=10))

    class Reasoning(ReasoningParser):
        def is_reasoning_end(self, input_ids) -> bool:
            return free[5] in input_ids

        extract_content_ids = extract_reasoning = extract_reasoning_streaming = None

    monkeypatch.setattr(engine.scheduler.structured_output_manager, "reasoner_cls", Reasoning)
    answer = check_constrained(engine)
    end = free.index(free[5]) + 1
    assert answer[:end] == free[:end] and len(answer) == end + 35


def test_bad_words(engine):
    plain = answered(engine, greedy(max_tokens=20))
    params = greedy(max_tokens=20)
    params._bad_words_token_ids = [[plain[0]], plain[3:5]]
    answer = answered(engine, params)
    assert answer != plain and all(step_until(engine, ask(engine, answer))["agrees"])


def test_blocks_of_the_prefix_cache_stay_and_none_are_added(engine):
    assert engine.llm.reset_prefix_cache()
    answer = answered(engine, greedy("snapkv", 40, budget=48))
    engine.tokens([random_prompt(np.random.default_rng(2), 600)], greedy(max_tokens=1))
    before = {block.block_id: block.block_hash for block in engine.pool.blocks if block.block_hash is not None}
    step_until(engine, ask(engine, answer))
    after = {block.block_id: block.block_hash for block in engine.pool.blocks if block.block_hash is not None}
    assert after == before
    # All that is free is in the prefix cache: nothing is taken from it.
    unhashed = [one for one in engine.pool.free_block_queue.get_all_free_blocks() if one.block_hash is None]
    for block in unhashed:
        engine.pool.free_block_queue.remove(block)
    future = ask(engine, answer)
    assert not engine.scheduler._verifications.is_at_work and not future.done()
    assert len(step_until(engine, ask(engine, answer, may_evict=True))["agrees"]) == len(answer)
    engine.pool.free_block_queue.append_n(unhashed)
    engine.tokens([PROMPT[:40]], greedy(max_tokens=2))
    assert len(step_until(engine, future)["agrees"]) == len(answer)
    engine.assert_empty()


def test_users_come_first_and_are_not_changed(engine):
    """The verification gives its place up while somebody waits, and goes on afterwards."""
    rng = np.random.default_rng(3)
    prompts = [random_prompt(rng, 900) for _ in range(4)]  # 29 blocks each
    alone = [engine.tokens([prompt], greedy(max_tokens=12))[0] for prompt in prompts]
    assert engine.llm.reset_prefix_cache()
    answer = answered(engine, greedy("snapkv", 40, budget=48), prompt := random_prompt(rng, 2500))
    assert engine.llm.reset_prefix_cache()
    queued = engine.scheduler._queue_internal
    with pytest.MonkeyPatch.context() as patch, engine.with_blocks(110):
        tries = []
        patch.setattr(engine.scheduler._verifications, "_queue", lambda one: (tries.append(one), queued(one)))
        future = ask(engine, answer)  # 80 blocks, in three steps
        assert len(tries) == 1 and len(prompt) + 39 == tries[0].num_prompt_tokens
        engine.llm.llm_engine.engine_core.engine_core.step()
        for index, one in enumerate(prompts):
            engine.add(str(index), one, greedy(max_tokens=12))
        found = run(engine)
        assert [found[str(index)] for index in range(4)] == alone
        assert not future.done(), "nobody had to wait"
    engine.tokens([PROMPT[:40]], greedy(max_tokens=2))
    assert len(step_until(engine, future)["agrees"]) == 40
    engine.assert_empty()


def test_a_preempted_verification_comes_to_the_same(engine):
    answer = answered(engine, greedy("snapkv", 40, budget=48))
    expected = step_until(engine, ask(engine, answer))
    engine.llm.reset_prefix_cache()
    future = ask(engine, answer)
    core = engine.llm.llm_engine.engine_core.engine_core
    assert any(isinstance(one, VerifyingRequest) for one in engine.scheduler.requests.values())
    preempt_all(engine)
    core.step()
    engine.scheduler.finish_requests(list(engine.scheduler.requests), RequestStatus.FINISHED_ABORTED)
    found = step_until(engine, future)
    assert found["agrees"] == expected["agrees"]
    assert np.allclose(found["log_probs"], expected["log_probs"], atol=1e-3)
    engine.assert_empty()


def test_an_evaluation_is_told_while_others_run(engine):
    backend = EngineBackend(demo.model_path(), EngineOptions())
    backend._llm = engine.llm
    fields = {"whole": {"policy": "snapkv", "budget": 2000}, "harsh": {"policy": "random", "budget": 33}}
    asked = [(name, max_tokens) for max_tokens in (8, 20, 40) for name in fields]

    def answers(verify: bool) -> dict:
        requests = ((one, Request(PROMPT, fields[one[0]], one[1], [], verify)) for one in asked)
        return dict(backend.run(requests))

    found, plain = answers(True), answers(False)
    assert {key: answer.text for key, answer in found.items()} == {key: answer.text for key, answer in plain.items()}
    assert {answer.verified for answer in plain.values()} == {None}
    for name, max_tokens in asked:
        told = found[name, max_tokens].verified
        assert told.tokens == max_tokens and (told.agreeing == 1.0) == (name == "whole")
        assert (abs(told.log_prob_change) < 1e-3) == (name == "whole")
    engine.assert_empty()


def test_what_is_skipped(engine):
    answer = answered(engine, greedy("snapkv", 10, budget=48))
    assert engine.llm.reset_prefix_cache()
    assert step_until(engine, ask(engine, answer, max_tokens=100)) == {"skipped": "too_long", "tokens": 309}
    assert step_until(engine, ask(engine, answer, key="other")) == {"skipped": "unknown"}
    with engine.with_blocks(2):
        future = ask(engine, answer, seconds=0.0)
        engine.tokens([PROMPT[:20]], greedy(max_tokens=2))
        assert json.loads(future.result(0)) == {"skipped": "no_room"}
    engine.assert_empty()


def test_obstacles(engine, monkeypatch):
    config = engine.llm.llm_engine.vllm_config
    monkeypatch.setattr(config.parallel_config, "data_parallel_size", 2)
    assert obstacle(config, SamplingParams()) is None
    assert "thinking" in obstacle(config, SamplingParams(thinking_token_budget=9))
    monkeypatch.setattr(type(config.model_config), "is_moe", True)
    assert "--data-parallel-size" in obstacle(config, SamplingParams())


def test_only_so_many_prompts_are_remembered(engine, monkeypatch):
    """Those whose clients have left, and never asked."""
    monkeypatch.setattr("vllm_kvmerge.engine.verification.MAX_KNOWN_TOKENS", 700)
    answers = {key: answered(engine, greedy(max_tokens=2), key=key) for key in "abc"}
    assert step_until(engine, ask(engine, answers["a"], "a")) == {"skipped": "unknown"}
    assert len(step_until(engine, ask(engine, answers["b"], "b"))["agrees"]) == 2


@pytest.mark.parametrize(
    ("tokens", "is_loop"),
    [
        ([], False),
        ([5, 5, 5], False),
        ([1, 5, 5, 5, 5], True),
        ([1, 2] * 4, True),
        ([1, 2] * 3 + [1], False),
        ([9, *range(16)] + [*range(16)] * 3, True),
        ([*range(17)] * 4, False),
        ([5, 5, 5, 5, 6], False),
    ],
)
def test_loops(tokens, is_loop):
    assert repeats(tokens) == is_loop
