"""Counting what requests' caches hold, for reports and gauges."""

from types import SimpleNamespace

from vllm_kvmerge.engine.accounting import NUM_RECENT_CHANGES, NUM_RECENT_STEPS, Account, Accounts, Steps
from vllm_kvmerge.engine.metrics import _LIVE, FRONT_BYTES, CacheGauges
from vllm_kvmerge.engine.usage import USAGE_KEY, CacheSize

KIB = 1024


def take_step(steps: Steps, tokens: int, blocks: int, refresh: bool | None = None) -> None:
    """A step of a cache that keeps every token."""
    size = CacheSize(tokens, tokens, blocks)
    steps.begin(size)
    if (step := steps.add(size, is_in_prompt=False, refresh=refresh)) is not None:
        steps.end(step)


def test_the_newest_steps_and_changes_are_kept():
    """One entry per token, 10 to a block, compressed at 50 tokens though nothing has to go; then one to a block."""
    steps, changing = Steps(KIB, streams=True), Steps(KIB, streams=True)
    for tokens in range(1, 101):
        take_step(steps, tokens, (tokens + 9) // 10, False if tokens == 50 else None)
        take_step(changing, tokens, tokens)
    newest = list(range(101 - NUM_RECENT_STEPS, 101))
    found = steps.newest()["steps"]
    assert [step["tokens"] for step in found] == [1, 11, 21, 31, 41, 50, 51, 61, 71, 81, *newest]
    assert [step["step"] for step in found] == [step["tokens"] for step in found]
    assert [step["step"] for step in changing.newest()["steps"]] == list(range(101 - NUM_RECENT_CHANGES, 101))


def test_who_asks_for_the_end_alone_gets_no_steps():
    account = Account(request=None, config=None, compression=None, steps=Steps(KIB, streams=False))
    account.note(CacheSize(3, 3, 3))
    take_step(account.steps, 3, 3)
    report = account.report(account.steps, KIB)
    assert report["mean_entries"] == 3 and "steps" not in report
    assert account.answer(None, KIB, is_last=False) is None


def test_a_policy_whose_last_request_has_ended_holds_nothing():
    gauges = CacheGauges(0, 1024)
    read = [gauge.labels("h2o", 0)._value.get for gauge in _LIVE]
    fronts = [FRONT_BYTES.labels(name, 0)._value.get for name in ("cache", "int8", "int4")]
    coded = CacheSize(1, 1, 3, front_blocks=2, coding="int8")
    gauges.update([("h2o", CacheSize(9, 12, 3)), ("h2o", coded), ("snapkv", coded)])
    assert [get() for get in read] == [10, 13, 6 * 1024, 0]
    assert [get() for get in fronts] == [0, 4 * 1024, 0]
    gauges.update([("snapkv", CacheSize(5, 5, 1))])
    assert [get() for get in read] == [0] * 4 and [get() for get in fronts] == [0] * 3


def test_means_begin_with_the_step_that_ends_the_prompt():
    sizes = [CacheSize(8, 8, 1), CacheSize(6, 16, 2), CacheSize(7, 17, 3)]
    accounts, request = Accounts(KIB, lambda _: sizes[0]), SimpleNamespace(request_id="a", num_prompt_tokens=16)
    accounts.begin(request, {USAGE_KEY: True}, None, None)
    while sizes:
        accounts.begin_step([request])
        accounts.end_step([request], {})
        del sizes[0]
    steps = accounts._accounts["a"].steps
    assert (steps.count, steps.total_entries, steps.total_blocks, steps.peak_entries) == (2, 13, 5, 8)
