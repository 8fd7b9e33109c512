"""N-gram drafts beside latents (MLA): they change how fast tokens come, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.engine.conftest import Engine, preempting, run
from tests.engine.test_hybrid import add, greedy, prompts_of_many_lengths, running, stock
from tests.engine.test_mla import folder, jobs
from tests.engine.test_speculative import (
    DRAFTING,
    assert_same,
    fronts,
    numbers,
    params,
    repeating,
    repetitive,
    with_drafts,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

__all__ = ["folder"]  # a fixture

LONGEST = 2048


def told() -> list[tuple[list[int], SamplingParams]]:
    """Requests of every kind, whose texts repeat themselves."""
    return repeating(jobs())


@pytest.fixture(scope="module")
def expected(folder) -> list[list[int]]:
    """Without drafts."""
    with running(folder) as engine:
        return engine.tokens([prompt for prompt, _ in told()], [asked for _, asked in told()])


@pytest.fixture(scope="module")
def engine(folder: Path, expected: list[list[int]]) -> Iterator[Engine]:
    with with_drafts(), running(folder, logits_processors=[], **DRAFTING) as engine:
        yield engine


def test_plain_requests_equal_stock_vllm_with_the_same_drafts(engine, folder):
    """Prompts longer than ``max_num_batched_tokens`` too, which stock vLLM would never begin: it gets a larger one."""
    prompts = prompts_of_many_lengths()
    assert max(map(len, prompts)) > engine.llm.llm_engine.vllm_config.scheduler_config.max_num_scheduled_tokens
    outputs = engine.generate(prompts, greedy())
    drafted, accepted = numbers(outputs)
    assert 0 < accepted < drafted
    found = [list(one.outputs[0].token_ids) for one in outputs]
    assert found == stock(folder, **DRAFTING, max_num_batched_tokens=LONGEST)
    engine.assert_empty()


def test_drafts_change_no_request(engine, expected):
    outputs = engine.generate([prompt for prompt, _ in told()], [asked for _, asked in told()])
    assert [list(one.outputs[0].token_ids) for one in outputs] == expected
    by_request = [numbers([output]) for output in outputs]
    assert sum(0 < accepted < drafted for drafted, accepted in by_request) > len(by_request) // 2
    engine.assert_empty()


def test_nor_does_preemption(engine, expected):
    for index, (prompt, asked) in enumerate(told()):
        add(engine, str(index), prompt, asked)
    preempted = run(engine, preempting(engine, 12))
    assert [preempted[str(index)] for index in range(len(expected))] == expected
    engine.assert_empty()


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": "h2o"},
        {"policy": "tova"},
        {"policy": "morphkv"},
        {"policy": "snapkv", "score_window": "all", "decode": "bounded"},
        {"policy": "h2o", "budget": 230, "interval": 20},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_rejected_drafts_leave_no_trace_in_statistics(engine, monkeypatch, fields):
    prompt = repetitive(1, 220)
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "_draft_end", lambda request: 0)
        expected = fronts(engine, fields, prompt)
    drafted, accepted = numbers(engine.generate([prompt], params(fields)))
    assert 0 < accepted < drafted
    found = fronts(engine, fields, prompt)
    assert_same(found, expected)
    engine.assert_empty()
