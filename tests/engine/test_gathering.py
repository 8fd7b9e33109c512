"""Compressions that are due a few steps apart wait for each other, once, and answers stay what they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, pairwise
from unittest.mock import patch

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.conftest import Engine, random_prompt
from vllm_kvmerge import compression
from vllm_kvmerge.engine.gathering import NextCompression, held_back
from vllm_kvmerge.engine.worker.compactor import Compactor


def test_those_due_wait_for_one_that_soon_is():
    batch = {"due": NextCompression("a", 0, 0, 4), "soon": NextCompression("a", 4, 0, 4)}
    assert held_back(batch) == {"due"}
    assert held_back(batch | {"late": NextCompression("a", 5, 0, 4)}) == {"due"}
    assert not held_back(batch | {"soon": NextCompression("b", 4, 0, 4)}), "they would be no batch"
    assert not held_back(batch | {"soon": NextCompression("a", 5, 0, 4)})


def test_none_waits_longer_than_it_may():
    soon = NextCompression("a", 1, 0, 4)
    assert held_back({"due": NextCompression("a", 0, 3, 4), "soon": soon}) == {"due"}
    assert not held_back({"due": NextCompression("a", 0, 4, 4), "soon": soon})
    assert not held_back({"due": NextCompression("a", 0, 0, 0), "soon": soon})
    first, second = NextCompression("a", 0, 4, 4), NextCompression("a", 0, 1, 4)
    assert not held_back({"first": first, "second": second, "soon": soon}), "the first takes all along"


@contextmanager
def batches(at_prompt_end: bool = False) -> Iterator[list[int]]:
    """How many requests each batch of compressions has, while they generate or at the end of their prompts."""
    found: list[int] = []
    of_many = Compactor._batch

    def counted(self, compactions, num_rows):
        if compactions[0].is_of_tokens == at_prompt_end:
            found.append(len(compactions))
        return of_many(self, compactions, num_rows)

    with patch.object(Compactor, "_batch", counted):
        yield found


def stagger(engine: Engine, prompts: list[list[int]], steps: int, *params: SamplingParams) -> list[list[int]]:
    """Answers to requests that come ``steps`` apart. params: of each in turn."""
    core, answers = engine.llm.llm_engine, {}
    for index, (prompt, of_request) in enumerate(zip(prompts, cycle(params), strict=False)):
        core.add_request(f"staggered {index}", {"prompt_token_ids": prompt}, of_request)
        for _ in range(steps):
            for output in core.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
    while core.has_unfinished_requests():
        for output in core.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
    engine.assert_empty()
    return [answers[f"staggered {index}"] for index in range(len(prompts))]


@pytest.mark.thin(10)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("policy", ["keepkv", "morphkv", "zsmerge", "weightedkv", "h2o"])
def test_requests_of_unlike_budgets_come_to_be_one_batch(engine: Engine, policy: str, steps: int) -> None:
    rng = np.random.default_rng(4)
    prompts = [random_prompt(rng, num_tokens) for num_tokens in (160, 130, 170, 150)]
    params = [
        SamplingParams(
            temperature=0, max_tokens=100, ignore_eos=True, extra_args=compression(policy, budget=budget, interval=16)
        )
        for budget in (120, 64, 100, 77)
    ]
    alone = [engine.tokens([prompt], of_one)[0] for prompt, of_one in zip(prompts, params, strict=True)]
    with batches() as found:
        assert stagger(engine, prompts, steps, *params) == alone
    assert found.count(4) >= 3, found


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["keepkv", "morphkv", "streaming_llm"])
def test_requests_of_different_steps_come_to_be_one_batch(engine: Engine, policy: str) -> None:
    rng = np.random.default_rng(3)
    prompts = [random_prompt(rng, 160) for _ in range(4)]
    extra = compression(policy, budget=64, interval=16)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, extra_args=extra)
    alone = [engine.tokens([prompt], params)[0] for prompt in prompts]
    with batches() as found:
        assert stagger(engine, prompts, 2, params) == alone
    # The first waits for two more at most, and the next time all four are near enough.
    assert found[:5] == [3, 1, 4, 4, 4]
    with batches() as found:
        assert stagger(engine, prompts[:2], 8, params) == alone[:2]
    assert max(found) == 1, "too far apart"


def test_tokens_are_sampled_before_compactions(engine: Engine, monkeypatch) -> None:
    done: list[str] = []

    def noted(owner, name: str) -> None:
        method = getattr(owner, name)

        def call(*args, **kwargs):
            if name == "_sample" or engine.compression.step.plans:
                done.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    noted(type(engine.runner), "_sample")
    noted(type(engine.compression), "run_plans")
    extra = compression("h2o", budget=64, interval=4)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, extra_args=extra)
    engine.tokens([random_prompt(np.random.default_rng(4), 100)], params)
    assert done.count("run_plans") >= 3
    assert all(before == "_sample" for before, name in pairwise(done) if name == "run_plans")


@pytest.mark.thin(6)
@pytest.mark.parametrize("policy", ["snapkv", "keepkv", "morphkv", "zsmerge", "weightedkv", "h2o"])
def test_prompts_of_unlike_lengths_come_to_be_one_batch(engine: Engine, policy: str) -> None:
    rng = np.random.default_rng(5)
    prompts = [random_prompt(rng, num_tokens) for num_tokens in (100, 93, 121, 80)]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=compression(policy, budget=budget))
        for budget in (60, 0.7, 0.5, 64)
    ]
    alone = [engine.tokens([prompt], of_one)[0] for prompt, of_one in zip(prompts, params, strict=True)]
    with batches(at_prompt_end=True) as found:
        assert stagger(engine, prompts, 0, *params) == alone
    assert found == [4]
