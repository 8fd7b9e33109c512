"""Steps without compressed requests: they are vLLM's, and workers learn even so of what has gone."""

import json
import os
import sys

import pytest

from tests import preloaded
from tests.engine.conftest import BYTES_PER_BLOCK, NUM_BLOCKS, engine_arguments
from tests.engine.machine.driver import Driver
from tests.engine.machine.machine import TEXTS
from tests.engine.machine.setting import Setting
from vllm_kvmerge.engine.plan import NO_STEP, attached_step
from vllm_kvmerge.engine.scheduler import CompressionSchedulerMixin

pytestmark = pytest.mark.engine

FIELDS = {"policy": "adakv", "budget": 13, "decode": "bounded", "interval": 1, "window_size": 5, "score_window": 4}

CALLS = """
import json, statistics, sys
from vllm import LLM, SamplingParams
from vllm_kvmerge import kvmerge_engine_args
arguments, is_ours = json.load(sys.stdin)
engine = LLM(**(kvmerge_engine_args(**arguments) if is_ours else arguments)).llm_engine
for index in range(8):
    prompt = {"prompt_token_ids": [2 + index] * 200}
    engine.add_request(str(index), prompt, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
for _ in range(20):
    engine.step()
calls = []
def count(frame, event, value):
    calls[-1] += event in ("call", "c_call")
for _ in range(32):
    calls.append(0)
    sys.setprofile(count)
    engine.step()
    sys.setprofile(None)
print("CALLS", statistics.median(calls))  # gauges are set once in a while, by the clock
"""
MORE_CALLS = 160
"""Of functions in a step, at most, than stock vLLM's 3,000."""


@pytest.fixture
def relieved(monkeypatch):
    """Names of the requests of each step after which the scheduler of ours went on."""
    seen = []
    relieve = CompressionSchedulerMixin._relieve_pressure

    def note(self, step):
        seen.append(sorted(self.requests))
        return relieve(self, step)

    monkeypatch.setattr(CompressionSchedulerMixin, "_relieve_pressure", note)
    return seen


def ours(scheduler) -> set[str]:
    """The methods that vLLM would not run: those of the coordinator are replaced by ours, and ours by its own."""
    methods = {"cache_blocks", "get_num_blocks_to_allocate"} & set(vars(scheduler.kv_cache_manager.coordinator))
    places = ("_reserve_prefill_lookahead", scheduler), ("get_num_blocks_to_allocate", scheduler._manager)
    return methods | {f"{type(owner).__name__}.{name}" for name, owner in places if name not in vars(owner)}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_is_vllms_once_no_request_is_compressed(is_async, relieved):
    driver = Driver(Setting(num_blocks=64, is_async=is_async))
    scheduler = driver.scheduler
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


def test_workers_hear_in_a_step_of_plain_requests_which_fronts_have_gone(monkeypatch):
    driver = Driver(Setting(num_blocks=64))
    driver.add(TEXTS[0][:23], 5, FIELDS)
    driver.run_to_end()
    assert driver.worker.fronts
    driver.step()
    driver.reset(reset_running=False)
    driver.add(TEXTS[1][:20], 5, None)
    output = driver.scheduler.schedule()
    assert output.total_num_scheduled_tokens == 20
    assert set(attached_step(output).forgotten) == set(driver.worker.fronts)
    driver.scheduler.update_from_output(output, driver.worker.execute(output))
    assert not driver.worker.fronts
    output = driver.scheduler.schedule()
    assert attached_step(output) is NO_STEP
    driver.scheduler.update_from_output(output, driver.worker.execute(output))
    driver.finish()


@pytest.mark.parametrize("plain_attention", ["vllm", "ours"])
def test_a_step_calls_hardly_more_than_vllms(plain_attention):
    """Eight requests that generate, scheduler and worker in one thread."""
    common = engine_arguments() | {"kv_cache_memory_bytes": NUM_BLOCKS * BYTES_PER_BLOCK, "disable_log_stats": False}
    calls = []
    for is_ours in (False, True):
        own = {"additional_config": {"kvmerge": {"plain_attention": plain_attention}}} if is_ours else {}
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | ({} if is_ours else {"VLLM_PLUGINS": ""})
        job = json.dumps([common | own, is_ours])
        done = preloaded.run([sys.executable, "-c", CALLS], input=job, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        calls.append(float(done.stdout.split("CALLS", 1)[1]))
    stock, ours = calls
    assert 0 < ours - stock < MORE_CALLS
