"""Counting what a request's cache holds."""

from vllm_kvmerge.engine.usage import NUM_RECENT_CHANGES, NUM_RECENT_STEPS, CacheSize, CacheUsage

KIB = 1024


def take_step(usage: CacheUsage, tokens: int, before: int, after: int) -> None:
    """A step of a cache of ``before`` entries, compressed to ``after`` if that is less; one entry per block."""
    usage.note_peak(CacheSize(before, tokens, before))
    usage.count_step(CacheSize(after, tokens, after))
    if after < before:
        usage.count_change(CacheSize(after, tokens, after), is_refresh=False)
    step = usage.begin_step(CacheSize(after, tokens, after), compressed=after < before)
    if step is not None:
        usage.end_step(step)


def test_steps_say_what_a_compression_changed():
    usage = CacheUsage(KIB, streams=True)
    take_step(usage, 10, 10, 10)
    take_step(usage, 11, 11, 4)
    take_step(usage, 12, 5, 5)
    steps = usage.steps_report()["steps"]
    assert [(step["step"], step["tokens"], step["entries"], step["bytes"]) for step in steps] == [
        (1, 10, 10, 10 * KIB),
        (2, 11, 4, 4 * KIB),
        (3, 12, 5, 5 * KIB),
    ]
    assert [step.get("before") for step in steps] == [None, {"entries": 11, "bytes": 11 * KIB}, None]
    times = [time for step in steps for time in (step["start"], step["end"])]
    assert times == sorted(times) and times[0] >= 0
    report = {
        "mean_entries": 19 / 3,
        "mean_bytes": 19 * KIB / 3,
        "peak_entries": 11,
        "peak_bytes": 11 * KIB,
        "compressions": 1,
    }
    assert usage.report() == report | {"kv_compression": {"policy": "full"}, "steps": steps}


def test_a_step_that_changes_nothing_is_left_out():
    usage = CacheUsage(KIB, streams=True)
    for _ in range(3):
        take_step(usage, 10, 10, 10)
    assert [step["step"] for step in usage.recent] == [1]
    assert usage.num_steps == 3


def test_the_newest_steps_and_changes_are_kept():
    """One entry per token, 10 to a block, compressed at 50 tokens though nothing has to go."""
    usage = CacheUsage(KIB, streams=True)
    for tokens in range(1, 101):
        size = CacheSize(tokens, tokens, blocks=(tokens + 9) // 10)
        usage.note_peak(size)
        usage.end_step(usage.begin_step(size, compressed=tokens == 50))
    newest = list(range(101 - NUM_RECENT_STEPS, 101))
    steps = usage.steps_report()["steps"]
    assert [step["tokens"] for step in steps] == [1, 11, 21, 31, 41, 50, 51, 61, 71, 81, *newest]
    assert [step["step"] for step in steps] == [step["tokens"] for step in steps]

    usage = CacheUsage(KIB, streams=True)
    for tokens in range(1, 101):
        take_step(usage, tokens, tokens, tokens)
    assert [step["step"] for step in usage.steps_report()["steps"]] == list(range(101 - NUM_RECENT_CHANGES, 101))


def test_who_asks_for_the_end_alone_gets_no_steps():
    usage = CacheUsage(KIB)
    usage.note_peak(CacheSize(3, 3, 3))
    usage.count_step(CacheSize(3, 3, 3))
    figures = {"mean_entries", "mean_bytes", "peak_entries", "peak_bytes", "compressions"}
    assert set(usage.report()) == figures | {"kv_compression"}
