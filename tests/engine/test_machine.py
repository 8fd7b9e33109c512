"""The scheduler, its blocks and its caches under random schedules, without a model: see tests/engine/machine.

``--operations 100000`` has a longer run, of other examples each time: ``make machine OPERATIONS=100000``.
"""

import logging
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.machine.driver import Driver
from tests.engine.machine.machine import TEXTS, Machine
from tests.engine.machine.setting import BLOCK_SIZE, WINDOW, Setting

pytestmark = pytest.mark.engine

NUM_STEPS = 50
"""Rules of an example."""
SEED = 1
EXAMPLES = 120
FAST = 60
"""Examples in the fast layer."""
FEW = 4
SEEDS = (1, 2, 4, 5, 6, 9)
"""Of which a few examples each find the faults of tests/mutants/schedules.yaml."""

EVENTS = (
    "preemptions",
    "compressions spread",
    "compressions failed",
    "steps with several compressions",
    "refreshes",
    "fronts adopted",
    "fronts reported",
    "turns kept",
    "resets that succeed",
    "blocks zeroed",
    "prefix-cache hits",
    "blocks of windows copied",
    "windows turned",
    "answers verified",
)
"""What must come about in a run, or it proves little."""


@pytest.fixture(autouse=True)
def quiet():
    """vLLM logs resets and pauses."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def run(num_examples: int, *phases: Phase, of_seed: int | None = SEED) -> None:
    """of_seed: which makes examples the same wherever it runs; None: random ones."""
    machine: type[Machine] = type("RandomSchedules", (Machine,), {})
    if of_seed is not None:
        machine = seed(of_seed)(machine)
    chosen = settings(
        max_examples=num_examples,
        stateful_step_count=NUM_STEPS,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=phases,
        report_multiple_bugs=False,
    )
    # Hypothesis draws constants of the modules that are loaded, which depend on the tests that have run before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None)
        run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.timeout(7200)
def test_random_schedules(pytestconfig):
    asked = pytestconfig.getoption("--operations")
    before, events, started = Machine.operations, Machine.events.copy(), time.process_time()
    if asked is None:
        run(EXAMPLES if pytestconfig.getoption("all") else FAST, Phase.generate, Phase.shrink)
    while Machine.operations - before < (asked or 0):
        run(EXAMPLES, Phase.generate, Phase.shrink, of_seed=None)
    done, seconds = Machine.operations - before, time.process_time() - started
    print(f"\n{done} operations, {done / seconds:.0f} per second of processor time")
    print(", ".join(f"{what}: {number}" for what, number in sorted((Machine.events - events).items())))
    missing = [event for event in EVENTS if Machine.events[event] == events[event]]
    assert not missing, f"no {', '.join(missing)} in {done} operations"


@pytest.mark.parametrize("of_seed", SEEDS)
def test_schedules_that_have_found_faults(of_seed):
    run(FEW, Phase.generate, of_seed=of_seed)


# What random schedules have found.


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("has_windows", "decode"), [(False, "bounded"), (False, "grow"), (True, "bounded")])
def test_a_preempted_request_that_has_outgrown_the_pool_goes_on(is_async, has_windows, decode):
    """Its prompt and what it has generated are more tokens than the pool has slots, and the prefix cache has no front
    for it to begin with."""
    small = Setting(num_blocks=24, has_prefix_cache=False, step_tokens=16, max_seqs=2)
    driver = Driver(replace(small, is_async=is_async, has_windows=has_windows))
    fields = {"policy": "streaming_llm", "budget": 9, "num_sink_tokens": 1, "decode": decode}
    prompt = 44 if has_windows else 70
    name = driver.add(TEXTS[0][:prompt], 60, fields)
    request = driver.scheduler.requests[name]
    while request.num_tokens <= 23 * 4:
        assert driver.step()
    driver.preempt(name)
    driver.add(TEXTS[1][:20], 5, None)
    driver.finish()
    assert request.is_finished() and request.num_preemptions >= 1


def test_a_repetition_that_nobody_needs_ends_with_a_reset():
    driver = Driver(Setting(has_prefix_cache=False))
    name = driver.add(TEXTS[0][:30], 5, {"policy": "kvzip", "budget": 9, "chunk_size": 11})
    while not any("/" in one for one in driver.scheduler.requests):
        assert driver.step()
    driver.reset(reset_running=True)
    output = driver.scheduler.schedule()
    assert list(output.num_scheduled_tokens) == [name]


def test_requests_that_wait_for_scores_of_a_step_without_room_are_not_preempted():
    """They have just been computed; resumed at once, vLLM's worker would not be told their tokens."""
    driver = Driver(Setting(num_blocks=64, step_tokens=2, chunk=1, max_seqs=4))
    fields = {"policy": "kvzip", "budget": 9, "chunk_size": 11, "context_tokens": 10}
    driver.add(TEXTS[0][:10], 1, fields)
    for _ in range(4):  # its context's blocks are found by the others
        driver.step()
    names = [driver.add(TEXTS[0][:11], 1, fields) for _ in range(3)]
    requests = [driver.scheduler.requests[name] for name in names]
    driver.finish()
    assert [request.num_preemptions for request in requests] == [0, 0, 0]


def test_a_block_in_the_hole_of_a_front_is_zeroed_before_others_get_it():
    """A request that begins with a front writes its last token there, which the front has already."""
    driver = Driver(Setting(num_blocks=64))
    fields = {"policy": "adakv", "budget": 13, "decode": "bounded", "interval": 1, "context_tokens": 20}
    fields |= {"window_size": 5, "kernel_size": 3, "score_window": 4}
    for _ in range(3):
        driver.add(TEXTS[0][:20], 1, fields)
        driver.run_to_end()
    assert driver.events["fronts adopted"]
    for first in range(6):
        driver.add(TEXTS[1][first : first + 1], 1, None)
    driver.finish()


def test_blocks_of_a_step_that_is_given_to_others_leave_the_prefix_cache():
    """vLLM puts them there before they are computed, and then gives their room to a request with a higher priority."""
    driver = Driver(Setting(num_blocks=11, by_priority=True, step_tokens=16, chunk=8))
    driver.add(TEXTS[0][:33], 2, None, priority=1)
    driver.step()
    driver.add(TEXTS[1][:9], 20, None)  # takes one of the two blocks that are left
    driver.finish()


@pytest.mark.parametrize("step_tokens", [4, 32])  # computed again before the output of the step in flight, or after
def test_caches_are_reset_while_a_front_is_copied(step_tokens):
    driver = Driver(Setting(num_blocks=64, is_async=True, step_tokens=step_tokens))
    fields = {"policy": "adakv", "budget": 13, "decode": "bounded", "interval": 1, "window_size": 5, "score_window": 4}
    driver.add(TEXTS[0][:23], 5, fields)
    while not driver.scheduler._sharing._unshared:
        assert driver.step()
    driver.reset(reset_running=True)
    assert driver.events["resets that succeed"] == 1
    driver.finish()


def test_entries_of_skipped_layers_count_towards_the_pool():
    """They grow with the text, whatever the budget: the request was preempted and computed again for ever."""
    driver = Driver(Setting(num_blocks=16, head_pages=False, step_tokens=16))
    driver.add(TEXTS[0][:37], 35, {"policy": "rkv", "budget": 0.3, "skip_layers": 1})
    driver.finish()


def test_who_waits_for_blocks_holds_no_room_outside_the_pool():
    """It has asked for room before it found no blocks; a request that goes first needs that room."""
    driver = Driver(Setting(num_blocks=24, by_priority=True, external_tokens=60, step_tokens=16))
    fields = {"policy": "h2o", "budget": 9, "score_window": 4, "refresh": {"every": 3, "queries": 2}}
    driver.add(TEXTS[0][:60], 6, None)
    for _ in range(5):
        driver.step()
    driver.add(TEXTS[1][:40], 5, fields, priority=1)
    driver.step()
    first = driver.add(TEXTS[2][:16], 5, fields)
    driver.step()
    assert first in {request.request_id for request in driver.scheduler.running}
    driver.finish()


@pytest.mark.parametrize("num_free", [4, 5, 6])
def test_a_turn_is_found_although_there_is_hardly_room_to_copy_its_last_block(num_free):
    """Which must stay until it has been copied."""
    driver = Driver(Setting())
    fields = {"policy": "streaming_llm", "budget": 9, "num_sink_tokens": 1, "reuse": "turns"}
    driver.add(TEXTS[0][:26], 4, fields)
    driver.run_to_end()
    ((said, *_),) = driver.texts
    driver.add(TEXTS[1][:5], 3, None)
    driver.step()
    driver.pin(num_free)
    driver.add(said + TEXTS[1][:2], 2, fields)
    driver.step()
    driver.finish()


def test_a_front_of_before_a_preemption_is_not_offered():
    """While its request has new blocks, to which it has not been written again. What random schedules found."""
    state, own = Machine(), {"family": 0, "common": 0, "number": 1, "priority": 0, "keeps": False}
    state.start(setting=Setting(num_blocks=64, is_async=True, max_seqs=4))
    state.add(index=1, is_plain=False, length=14, max_tokens=1, share=None, salt=None, then=1, **own)
    state.add(index=0, is_plain=True, length=48, max_tokens=35, share=None, salt=None, then=1, **own)
    state.trouble_worker(number=1, pace=0.03)
    state.go_on(index=0, text=0, question=1, max_tokens=1, then=8)
    state.ask_again(index=0, which=0, question=1, max_tokens=1, number=1, then=8)
    state.ask_again(index=0, which=0, question=1, max_tokens=1, number=1, then=20)
    state.preempt(which=0, number=1)
    state.driver.finish()


def test_windows_stay_where_a_repetition_begins():
    """At the last full block of the context, which a step would pass by a token or two."""
    driver = Driver(Setting(has_windows=True, step_tokens=22))
    name = driver.add(TEXTS[0][:23], 2, {"policy": "kvzip", "budget": 9, "chunk_size": 11})
    while not any("/" in one for one in driver.scheduler.requests):
        assert driver.step()
    (windows,), begins_at = driver.scheduler._manager.windows, 23 // BLOCK_SIZE * BLOCK_SIZE
    first = (begins_at - WINDOW + 1) // BLOCK_SIZE
    assert not any(block.is_null for block in windows.req_to_blocks[name][first:])
    driver.finish()
