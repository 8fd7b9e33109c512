"""Counting what a request's cache holds."""

from vllm_kvmerge.engine.accounting import NUM_RECENT_CHANGES, NUM_RECENT_STEPS, Account, Steps
from vllm_kvmerge.engine.usage import CacheSize

KIB = 1024


def opened(streams: bool = True) -> Account:
    return Account(request=None, config=None, compression=None, steps=Steps(KIB, streams))


def take_step(account: Account, tokens: int, before: int, after: int) -> None:
    """A step of a cache of ``before`` entries, compressed to ``after`` if that is less; one entry per block."""
    size = CacheSize(before, tokens, before)
    account.note(size)
    account.steps.begin(size)
    refresh = False if after < before else None
    step = account.steps.add(CacheSize(after, tokens, after), is_in_prompt=False, refresh=refresh)
    if step is not None:
        account.steps.end(step)


def test_steps_say_what_a_compression_changed():
    account = opened()
    take_step(account, 10, 10, 10)
    take_step(account, 11, 11, 4)
    take_step(account, 12, 5, 5)
    steps = account.steps.newest()["steps"]
    found = [(step["step"], step["tokens"], step["entries"], step["bytes"]) for step in steps]
    assert found == [(1, 10, 10, 10 * KIB), (2, 11, 4, 4 * KIB), (3, 12, 5, 5 * KIB)]
    assert [step.get("before") for step in steps] == [None, {"entries": 11, "bytes": 11 * KIB}, None]
    times = [time for step in steps for time in (step["start"], step["end"])]
    assert times == sorted(times) and times[0] >= 0
    report = account.report(account.steps, KIB)
    assert (report["mean_entries"], report["mean_bytes"]) == (19 / 3, 19 * KIB / 3)
    assert (report["peak_entries"], report["peak_bytes"], report["compressions"]) == (11, 11 * KIB, 1)
    assert (report["kv_compression"], report["steps"]) == ({"policy": "full"}, steps)
    take_step(account, 13, 5, 5)  # which changes nothing, and is left out
    take_step(account, 13, 5, 5)
    assert len(account.steps.recent) == 4 and account.steps.count == 5


def test_the_newest_steps_and_changes_are_kept():
    """One entry per token, 10 to a block, compressed at 50 tokens though nothing has to go."""
    steps = Steps(KIB, streams=True)
    for tokens in range(1, 101):
        size = CacheSize(tokens, tokens, blocks=(tokens + 9) // 10)
        steps.begin(size)
        steps.end(steps.add(size, is_in_prompt=False, refresh=False if tokens == 50 else None))
    newest = list(range(101 - NUM_RECENT_STEPS, 101))
    found = steps.newest()["steps"]
    assert [step["tokens"] for step in found] == [1, 11, 21, 31, 41, 50, 51, 61, 71, 81, *newest]
    assert [step["step"] for step in found] == [step["tokens"] for step in found]

    account = opened()
    for tokens in range(1, 101):
        take_step(account, tokens, tokens, tokens)
    found = account.steps.newest()["steps"]
    assert [step["step"] for step in found] == list(range(101 - NUM_RECENT_CHANGES, 101))


def test_who_asks_for_the_end_alone_gets_no_steps():
    account = opened(streams=False)
    take_step(account, 3, 3, 3)
    report = account.report(account.steps, KIB)
    assert report["mean_entries"] == 3 and "steps" not in report
    assert account.answer(None, KIB, is_last=False) is None
