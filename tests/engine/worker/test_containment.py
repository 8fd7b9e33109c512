"""A policy that fails harms its own request alone; what a merge makes is finite."""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.engine.worker.test_batches import INTERVAL, NUM_HEADS, NUM_LAYERS, Worker
from tests.entries import gather_entries
from tests.policies import failing
from vllm_kvmerge.policies.bounds import time_limit
from vllm_kvmerge.policies.errors import OutOfTime, PartError, PartTimeout, PartTooLarge
from vllm_kvmerge.request.parameters import parse_compression

MAX_SECONDS = 0.3


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with failing.registered():
        yield


def run(worker: Worker, compactions, max_seconds: float | None = MAX_SECONDS):
    return replace(worker.compactor, max_seconds=max_seconds).execute(compactions)


@pytest.mark.parametrize(("field", "fault", "part"), [one for one in failing.FAULTS if one[1] != "sleep_a_little"])
@pytest.mark.parametrize("max_bytes", [1, 64 << 20], ids=["head-by-head", "together"])
def test_others_in_the_step_are_compressed_as_ever(field: str, fault: str, part: str, max_bytes: int) -> None:
    """The failing request keeps its newest entries; the bytes of all others are what they are without it."""
    with_it, without = (Worker("h2o", (150, 150, 150)) for _ in range(2))
    policy = parse_compression({"policy": failing.PRESET, "budget": 50, field: fault}).policy
    step = [with_it.first[0], replace(with_it.first[1], policy=policy), with_it.first[2]]
    compactor = replace(with_it.compactor, max_bytes=max_bytes, max_seconds=MAX_SECONDS)
    done = compactor.execute(step)
    expected = without.compactor.execute([without.first[0], without.first[2]])
    assert list(done.failures) == [1] and done.failures[1].part == part
    assert str(done.failures[1]).startswith(part.replace(":", " ")) and "\n" not in str(done.failures[1])
    assert torch.equal(done.counts[[0, 2]], expected.counts)
    assert done.counts[1, :3].tolist() == [0, 100 * NUM_LAYERS * NUM_HEADS, 0]
    for layer, pages in enumerate(with_it.layers):
        blocks = torch.tensor(step[1].plan.blocks)
        front = gather_entries(pages, blocks, 50, 150, 150)
        assert sorted(front.positions[0].tolist()) == list(range(100, 150))
        assert front.keys.isfinite().all() and front.values.isfinite().all()
        for index in (0, 2):
            blocks = torch.tensor(step[index].plan.blocks)
            mine = gather_entries(pages, blocks, 50, 150, 150)
            theirs = gather_entries(without.layers[layer], blocks, 50, 150, 150)
            assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.positions, theirs.positions)


@pytest.mark.parametrize(("field", "fault", "part"), [one for one in failing.FAULTS if one[1] != "sleep_a_little"])
def test_one_that_is_compressed_in_parts_fails_as_at_once(field: str, fault: str, part: str) -> None:
    at_once, in_parts = (Worker("h2o", (150,)) for _ in range(2))
    policy = parse_compression({"policy": failing.PRESET, "budget": 50, field: fault}).policy
    results = []
    for worker in (at_once, in_parts):
        compactor = replace(worker.compactor, max_seconds=MAX_SECONDS)
        step = [replace(worker.first[0], policy=policy)]
        begun = {0: compactor.begin(step[0], 1000)} if worker is in_parts else {}
        for course in begun.values():
            course.advance(0.3)
        results.append(compactor.execute(step, begun))
    assert [str(done.failures[0]) for done in results][1].startswith(part.replace(":", " "))
    assert results[1].failures[0].part == results[0].failures[0].part == part
    assert torch.equal(results[0].counts, results[1].counts) and torch.equal(at_once.bytes, in_parts.bytes)


def test_a_batch_of_one_policy_is_tried_one_request_at_a_time(monkeypatch) -> None:
    """A part that fails on what one request's cache holds, in a batch of several requests with the same policy."""
    worker, alone = (Worker("keepkv", (150, 150, 150)) for _ in range(2))
    (zip_merger,) = {type(one.policy.merger) for one in worker.first}
    merge = zip_merger.merge

    def merge_unless(self, entries, *args):
        if bool((entries.keys == 77.0).any()):
            raise ArithmeticError("77")
        return merge(self, entries, *args)

    for pages in worker.layers:
        pages.keys[worker.first[1].source_blocks[0]] = 77.0
    monkeypatch.setattr(zip_merger, "merge", merge_unless)
    done = worker.compactor.execute(worker.first)
    monkeypatch.undo()
    assert {index: error.part for index, error in done.failures.items()} == {1: "merger:zip"}
    expected = alone.compactor.execute([alone.first[0], alone.first[2]])
    assert torch.equal(done.counts[[0, 2]], expected.counts)
    for index in (0, 2):
        blocks = torch.tensor(worker.first[index].plan.blocks)
        for mine, theirs in zip(worker.layers, alone.layers, strict=True):
            assert torch.equal(mine.keys[blocks], theirs.keys[blocks])


def test_an_allocator_that_fails_names_itself(monkeypatch) -> None:
    worker = Worker("d2o", (150, 150))
    allocator = type(worker.first[0].policy.allocator)
    monkeypatch.setattr(allocator, "layer_statistic", lambda *_: torch.zeros(99))
    done = worker.compactor.execute(worker.first)
    assert {error.part for error in done.failures.values()} == {"allocator:variance"}
    with pytest.raises(PartError, match="allocator variance: ValueError: layer_statistic must have the shape"):
        worker.compactor.run(worker.first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_that_overflow_leave_the_entry_as_it_was(dtype: torch.dtype) -> None:
    """CaM adds what leaves up in few entries: large values become infinite within a prompt."""
    worker = Worker("cam", (2000,), dtype, num_blocks=256, num_receivers=1, merge_prompt=True)
    for pages in worker.layers:
        pages.values.fill_(3e4 if dtype == torch.float16 else 3e38)
    done = worker.compactor.execute(worker.first)
    assert not done.failures and int(done.counts[0, 2]) > 0
    for pages in worker.layers:
        front = gather_entries(pages, torch.tensor(worker.first[0].plan.blocks), 50, 2000, 2000)
        assert front.values.isfinite().all() and front.log_votes.isfinite().all()
    worker.compactor.execute(worker.second)


@pytest.mark.parametrize("policy", ["keepkv", "zsmerge", "weightedkv", "d2o", "kvmerger", "cam", "asymkv", "grkv"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_nothing_that_is_written_is_infinite(policy: str, dtype: torch.dtype) -> None:
    """Keys and values as large as the cache's dtype can hold: whatever becomes of them is finite."""
    worker = Worker(policy, (150, 150), dtype)
    largest = torch.finfo(dtype).max
    for pages in worker.layers:
        for plane in (pages.keys, pages.values):
            plane.copy_(torch.where(torch.rand(plane.shape) < 0.5, largest, -largest))
    for step in (worker.first, worker.second):
        done = worker.compactor.execute(step)
        assert not done.failures
        for pages in worker.layers:
            for compaction in step:
                plan = compaction.plan
                front = gather_entries(
                    pages, torch.tensor(plan.blocks), plan.new_front, plan.num_tokens, plan.num_tokens
                )
                live = front.positions >= 0
                for plane in (front.keys, front.values, front.log_votes):
                    assert plane[live].isfinite().all()


def test_the_time_of_all_layers_counts_together() -> None:
    """A part that takes less than the limit for each layer, and more for all of them."""
    worker = Worker("h2o", (150,))
    request = {"policy": failing.PRESET, "budget": 50, "merge_fault": "sleep_a_little"}
    step = [replace(worker.first[0], policy=parse_compression(request).policy)]
    done = replace(worker.compactor, max_bytes=1, max_seconds=0.3).execute(step)
    assert isinstance(done.failures[0], PartTimeout)


@pytest.mark.parametrize(("fault", "kind"), [("sleep", PartTimeout), ("hold", PartTooLarge)])
def test_what_exceeds_its_bounds_twice_is_the_last(fault: str, kind: type[PartError]) -> None:
    worker = Worker("h2o", (150, 150, 150))
    policy = parse_compression({"policy": failing.PRESET, "budget": 50, "merge_fault": fault}).policy
    compactor = replace(worker.compactor, max_seconds=0.05)
    fails = [replace(one, policy=policy) for one in worker.first]
    first, second = (compactor.execute([one]).failures[0] for one in fails[:2])
    assert type(first) is type(second) is kind and first.part == second.part == "merger:failing"
    assert not first.is_last and second.is_last
    harmless = policy.model_copy(update={"merger": failing.FailingMerger(merge_fault="raise")})
    assert not compactor.execute([replace(fails[2], policy=harmless)]).failures[0].is_last, "which exceeds none"


def test_others_of_a_batch_that_holds_too_much_are_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a part holds too much for one request of several."""
    worker = Worker("h2o", (150, 150, 150))
    policy = parse_compression({"policy": failing.PRESET, "budget": 50}).policy
    for pages in worker.layers:
        pages.keys[worker.first[1].source_blocks[0]] = 77.0
    merge = failing.FailingMerger.merge

    def holds(self, entries, *args):
        if bool((entries.keys == 77.0).any()):
            torch.empty(failing.HELD)
        return merge(self, entries, *args)

    monkeypatch.setattr(failing.FailingMerger, "merge", holds)
    done = worker.compactor.execute([replace(one, policy=policy) for one in worker.first])
    assert {index: error.is_last for index, error in done.failures.items()} == {1: False}


def test_what_a_destructor_swallows_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Pytest's own takes so long on a busy machine that the next alarm interrupts it.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)

    class Deaf:
        def __del__(self) -> None:
            time.sleep(0.3)

    with pytest.raises(OutOfTime), time_limit(0.1):
        Deaf()
        time.sleep(5)


def test_time_is_limited_for_each_request() -> None:
    worker = Worker("h2o", (150,))
    policy = parse_compression({"policy": failing.PRESET, "budget": 50, "merge_fault": "sleep"}).policy
    done = run(worker, [replace(worker.first[0], policy=policy)])
    assert str(done.failures[0]) == "merger failing: took longer than it may (--max-compaction-seconds)"
    assert INTERVAL and not run(worker, worker.second).failures  # the alarm is off again


@pytest.mark.parametrize(
    ("policy", "is_limited"), [("keepkv", True), ("tova", False), ("adakv", False), ("d2o", False)]
)
def test_nobody_is_interrupted_whom_another_worker_waits_for(policy: str, is_limited: bool) -> None:
    worker = Worker(policy, (150,))
    (one,) = worker.first
    foreign = replace(one, policy=one.policy.model_copy(update={"merger": failing.FailingMerger()}))
    for is_alone in (True, False):
        compactor = replace(worker.compactor, max_seconds=MAX_SECONDS, is_alone=is_alone)
        left = compactor._batch([foreign], 0).time_left()
        assert (left is not None) == (is_alone or is_limited)
        assert compactor._batch([one], 0).time_left() is None, "our own are not limited"
