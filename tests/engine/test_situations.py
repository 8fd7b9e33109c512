"""Situations in which other caches of vLLM's were found wrong: preemption by priority, and a pause that discards the
cache."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.conftest import Engine, engine_with, preempt_all, run
from tests.engine.test_speculative import SPECULATION, with_drafts
from tests.engine.test_vllm_features import arguments, compressed, folder, random_text

pytestmark = [pytest.mark.engine, pytest.mark.slow]

__all__ = ["folder"]  # a fixture

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{90}$"}, "count": {"enum": [1, 2, 3]}},
    "required": ["name", "count"],
}


@pytest.fixture(scope="module", params=[{}, {"speculative_config": SPECULATION}], ids=["", "drafts"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    others: dict[str, Any] = {"scheduling_policy": "priority", "max_num_batched_tokens": 512} | request.param
    with with_drafts(), engine_with(**arguments(folder) | others) as engine:
        yield engine


def jobs() -> list[tuple[list[int], SamplingParams]]:
    """Half of the answers are JSON, half go on for at least some tokens; one request of four is not compressed."""
    found = []
    for index, policy in enumerate(["snapkv", "keepkv", "h2o", None, "morphkv", "zsmerge", "weightedkv", None]):
        decode = "grow" if index < 4 else "bounded"  # the one needs more and more blocks, the other up to 4
        more: dict[str, Any] = compressed(policy, decode=decode, interval=64) if policy else {}
        if index % 2:
            more["structured_outputs"] = StructuredOutputsParams(json=SCHEMA)
        params = SamplingParams(temperature=0, max_tokens=130, min_tokens=20 if index % 2 else 100, **more)
        found.append((random_text(index, 90 + 10 * index), params))
    return found


def submit(engine: Engine, index: int, prompt: list[int], params: SamplingParams, priority: int = 0) -> None:
    engine.llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params, priority=priority)


def alone(engine: Engine) -> list[list[int]]:
    """What each request generates by itself."""
    found = []
    for index, (prompt, params) in enumerate(jobs()):
        submit(engine, index, prompt, params)
        found.append(run(engine)[str(index)])
        assert engine.llm.reset_prefix_cache()
    return found


def test_preempted_again_and_again_by_priority(engine):
    expected = alone(engine)
    preemptions: Counter[str] = Counter()
    steps = count(1)

    def watch() -> None:
        if next(steps) % 40 == 0:  # besides those that the small pool brings about
            preempt_all(engine)
        for one in engine.scheduler.requests.values():
            preemptions[one.request_id] = one.num_preemptions

    tokens: dict[str, list[int]] = {}
    with engine.with_blocks(17):
        # Each is more urgent than those before it, and comes when they are generating.
        for index, (prompt, params) in enumerate(jobs()):
            submit(engine, index, prompt, params, priority=-index)
            for _ in range(3):
                for output in engine.llm.llm_engine.step():
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
                watch()
        tokens |= run(engine, watch)
    assert [tokens[str(index)] for index in range(len(expected))] == expected
    assert preemptions.total() >= 8 and max(preemptions.values()) >= 2
    tokenizer = engine.llm.get_tokenizer()
    for index in range(1, 8, 2):
        text = tokenizer.decode(tokens[str(index)], skip_special_tokens=True)
        assert len(json.loads(text)["name"]) == 90
    assert min(len(tokens[str(index)]) for index in range(0, 8, 2)) >= 100
    assert engine.llm.reset_prefix_cache()
    engine.assert_empty()


def test_a_pause_that_discards_the_cache_changes_no_answer(engine):
    expected, core = alone(engine), engine.llm.llm_engine
    with engine.sharing_contexts() as fronts:
        for index, (prompt, params) in enumerate(jobs()):
            submit(engine, index, prompt, params)
        tokens: dict[str, list[int]] = {}
        for pause in (12, 15, 20):
            for _ in range(pause):
                for output in core.step():
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
            core.sleep(level=1, mode="keep")
            assert len(fronts) == 0
            core.wake_up()
        tokens |= run(engine)
    assert [tokens[str(index)] for index in range(len(expected))] == expected
    engine.assert_empty()
