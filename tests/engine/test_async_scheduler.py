"""The scheduler for asynchronous scheduling: it plans step t + 1 before the tokens of step t are known.

vLLM's CPU workers do not run asynchronously, so no model runs.
"""

import random
from collections import defaultdict

import pytest

from tests.engine.machine.driver import Driver
from tests.engine.machine.setting import Setting
from tests.engine.machine.worker import NUM_TOKEN_IDS
from tests.engine.spread import AtOnce
from vllm_kvmerge.engine.messages import attached_step

FIELDS = {
    "streaming_llm": {},
    "h2o": {},
    "snapkv": {"window_size": 3, "score_window": 4},
    "keepkv": {"window_size": 3},
    "zsmerge": {"window_size": 3},
    "h2o threshold": {"budget": {"threshold": 0.01, "max": 14}},
    "kvzip": {"chunk_size": 11, "num_prefix_tokens": 2},
}


def plans(name: str, share: float | None, is_async: bool) -> dict[str, list[tuple]]:
    """Of each request, as (n, tokens computed, new_front, purpose); every third one is plain. share: of a prompt that
    is context."""
    driver, found = Driver(Setting(num_blocks=120, is_async=is_async)), defaultdict(list)
    driver.scheduler._planner._pace, schedule = AtOnce(1), driver.scheduler.schedule

    def noted(*args):
        output = schedule(*args)
        for plan in attached_step(output).compress:
            found[plan.request_id].append((plan.num_tokens, plan.seq_len, plan.new_front, plan.purpose))
        return output

    driver.scheduler.schedule = noted
    for index, length in enumerate([10, 90, 20, 110, 30, 25]):
        fields = {"policy": name.split()[0], "budget": 14} | FIELDS[name]
        if share is not None:
            fields["context_tokens"] = int(share * length)
        prompt = random.Random(index).choices(range(1, NUM_TOKEN_IDS + 1), k=length)
        driver.add(prompt, 40, fields if index % 3 else None)
    driver.finish()
    return found


@pytest.mark.parametrize("context_share", [None, 0.6])
@pytest.mark.parametrize("name", FIELDS)
def test_plans_are_those_of_synchronous_scheduling(name, context_share):
    expected, found = (plans(name, context_share, is_async) for is_async in (False, True))
    assert len(expected) > 1
    for request, some in expected.items():
        # A step that is in flight when the last token arrives may carry one more plan; it does no harm.
        assert found[request][: len(some)] == some and len(found[request]) <= len(some) + 1
