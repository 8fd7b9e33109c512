"""Steps without compressed requests are vLLM's."""

import pytest

from tests.engine.machine.driver import Driver
from tests.engine.machine.machine import TEXTS
from tests.engine.machine.setting import Setting
from vllm_kvmerge.engine.planning import Planner

pytestmark = pytest.mark.engine

FIELDS = {"policy": "adakv", "budget": 13, "decode": "bounded", "interval": 1, "window_size": 5, "score_window": 4}


def ours(scheduler) -> set[str]:
    """The methods that vLLM would not run: those of the coordinator are replaced by ours, and ours by its own."""
    methods = {"cache_blocks", "get_num_blocks_to_allocate"} & set(vars(scheduler.kv_cache_manager.coordinator))
    places = ("_reserve_prefill_lookahead", scheduler), ("get_num_blocks_to_allocate", scheduler._manager)
    return methods | {f"{type(owner).__name__}.{name}" for name, owner in places if name not in vars(owner)}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_is_vllms_once_no_request_is_compressed(is_async, monkeypatch):
    driver, relieved = Driver(Setting(num_blocks=64, is_async=is_async)), []
    scheduler, relieve = driver.scheduler, Planner.relieve_pressure

    def note(*arguments):
        relieved.append(sorted(scheduler.requests))
        return relieve(*arguments)

    monkeypatch.setattr(Planner, "relieve_pressure", note)
    everything = ours(scheduler)
    assert len(everything) == 4
    plain = [driver.add(TEXTS[1][:20], 60, None) for _ in range(2)]
    for _ in range(5):
        driver.step()
    assert not relieved and not ours(scheduler)
    compressed = driver.add(TEXTS[0][:23], 5, FIELDS)
    while compressed in scheduler.requests:
        driver.step()
        assert ours(scheduler) == everything
    assert compressed in relieved[0] and compressed in relieved[-1]
    driver.step()  # workers hear of what has gone with it
    del relieved[:]
    for _ in range(5):
        driver.step()
    assert sorted(scheduler.requests) == plain and not relieved and not ours(scheduler)
    driver.finish()
