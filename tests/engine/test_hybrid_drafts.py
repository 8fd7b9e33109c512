"""N-gram drafts beside layers with a window: they change how fast tokens come, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.engine.conftest import Engine, preempting, run
from tests.engine.test_hybrid import add, folder, jobs, running
from tests.engine.test_speculative import DRAFTING, numbers, repeating, repetitive, with_drafts
from tests.random_model import WINDOW

pytestmark = [pytest.mark.engine, pytest.mark.slow]

__all__ = ["folder"]  # a fixture


def told() -> list[tuple[list[int], SamplingParams]]:
    """Requests of every kind, whose texts repeat themselves."""
    return repeating(jobs()[::2])


@pytest.fixture(scope="module")
def expected(folder) -> list[list[int]]:
    """Without drafts."""
    with running(folder) as engine:
        return engine.tokens([prompt for prompt, _ in told()], [params for _, params in told()])


@pytest.fixture(scope="module")
def engine(folder: Path, expected: list[list[int]]) -> Iterator[Engine]:
    with with_drafts(), running(folder, logits_processors=[], **DRAFTING) as engine:
        yield engine


def test_drafts_change_no_request(engine, expected):
    prompts, params = [prompt for prompt, _ in told()], [params for _, params in told()]
    assert engine.llm.reset_prefix_cache()
    outputs = engine.generate(prompts, params)
    assert [list(one.outputs[0].token_ids) for one in outputs] == expected
    drafted, accepted = numbers(outputs)
    assert 0 < accepted < drafted and all(len(prompt) > WINDOW for prompt in prompts)
    engine.assert_empty()


def test_nor_does_preemption(engine, expected):
    assert engine.llm.reset_prefix_cache()
    for index, (prompt, params) in enumerate(told()):
        add(engine, str(index), prompt, params)
    preempted = run(engine, preempting(engine, 12))
    assert [preempted[str(index)] for index in range(len(expected))] == expected
    engine.assert_empty()


def test_what_follows_drafts_hits_the_prefix_cache_of_exact_blocks_alone(engine):
    """Those of layers with a window too: rejected drafts are in none of them."""
    prompt = repetitive(99, 400)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    assert engine.llm.reset_prefix_cache()
    cold = engine.generate([prompt], greedy)[0].outputs[0].token_ids
    longer = [*prompt, *cold]
    warm = engine.generate([longer], greedy)[0]
    assert warm.num_cached_tokens == len(prompt) // 32 * 32
    assert engine.llm.reset_prefix_cache()
    again = engine.generate([longer], greedy)[0]
    assert again.num_cached_tokens == 0 and again.outputs[0].token_ids == warm.outputs[0].token_ids
    engine.assert_empty()
