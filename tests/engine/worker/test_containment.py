"""A policy that fails harms its own request alone; what a merge makes is finite."""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.worker.test_batches import NUM_HEADS, NUM_LAYERS, Worker
from tests.policies import failing
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.policies import CompressionPolicy
from vllm_kvmerge.policies.bounds import time_limit
from vllm_kvmerge.policies.errors import OutOfTime, PartError, PartTimeout
from vllm_kvmerge.request.spec import parse_compression

MAX_SECONDS = 1.0


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with failing.registered():
        yield


FAULTS = [one for one in failing.FAULTS if one[1] != "sleep_a_little"]


def failing_policy(**fields: str) -> CompressionPolicy:
    return parse_compression({"policy": failing.PRESET, "budget": 50, **fields}).policy


def limited(worker: Worker, **changes: Any) -> Compactor:
    return replace(worker.compactor, **{"max_seconds": MAX_SECONDS} | changes)


@pytest.mark.parametrize(("field", "fault", "part"), FAULTS)
@pytest.mark.parametrize("max_bytes", [1, 64 << 20], ids=["head-by-head", "together"])
def test_others_in_the_step_are_compressed_as_ever(field: str, fault: str, part: str, max_bytes: int) -> None:
    """The failing request keeps its newest entries; the bytes of all others are what they are without it."""
    with_it, without = (Worker("h2o", (150, 150, 150)) for _ in range(2))
    step = list(with_it.first)
    step[1] = replace(step[1], policy=failing_policy(**{field: fault}))
    done = limited(with_it, max_bytes=max_bytes).execute(step)
    expected = without.compactor.execute([without.first[0], without.first[2]])
    assert list(done.failures) == [1] and done.failures[1].part == part
    assert str(done.failures[1]).startswith(part.replace(":", " ")) and "\n" not in str(done.failures[1])
    assert torch.equal(done.counts[[0, 2]], expected.counts)
    assert done.counts[1, :3].tolist() == [0, 100 * NUM_LAYERS * NUM_HEADS, 0]
    for front in with_it.fronts(step[1]):
        assert sorted(front.positions[0].tolist()) == list(range(100, 150))
        assert front.keys.isfinite().all() and front.values.isfinite().all()
    for index in (0, 2):
        for mine, theirs in zip(with_it.fronts(step[index]), without.fronts(step[index]), strict=True):
            assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.positions, theirs.positions)


@pytest.mark.parametrize(("field", "fault", "part"), FAULTS)
def test_one_that_is_compressed_in_parts_fails_as_at_once(field: str, fault: str, part: str) -> None:
    at_once, in_parts = (Worker("h2o", (150,)).use(failing_policy(**{field: fault})) for _ in range(2))
    expected = limited(at_once).execute(at_once.first)
    compactor = limited(in_parts)
    begun = compactor.begin(in_parts.first[0], 1000)
    begun.advance(0.3)
    done = compactor.execute(in_parts.first, {0: begun})
    assert str(done.failures[0]).startswith(part.replace(":", " "))
    assert done.failures[0].part == expected.failures[0].part == part
    assert torch.equal(done.counts, expected.counts) and torch.equal(at_once.bytes, in_parts.bytes)


@pytest.mark.parametrize("how", ["raises", "holds too much"])
def test_a_batch_of_one_policy_is_tried_one_request_at_a_time(monkeypatch, how: str) -> None:
    """A part that fails on what one request's cache holds, in a batch of several requests with the same policy."""
    worker, alone = (Worker("h2o", (150, 150, 150)).use(failing_policy()) for _ in range(2))
    merge = failing.FailingMerger.merge

    def merge_unless(self, entries, *args):
        if bool((entries.keys == 77.0).any()):
            if how == "raises":
                raise ArithmeticError("77")
            torch.empty(failing.HELD)
        return merge(self, entries, *args)

    for pages in worker.layers:
        pages.keys[worker.first[1].source_blocks[0]] = 77.0
    monkeypatch.setattr(failing.FailingMerger, "merge", merge_unless)
    done = worker.compactor.execute(worker.first)
    assert {index: (error.part, error.is_last) for index, error in done.failures.items()} == {
        1: ("merger:failing", False)
    }
    expected = alone.compactor.execute([alone.first[0], alone.first[2]])
    assert torch.equal(done.counts[[0, 2]], expected.counts)
    for index in (0, 2):
        for mine, theirs in zip(worker.fronts(worker.first[index]), alone.fronts(alone.first[index]), strict=True):
            assert torch.equal(mine.keys, theirs.keys)


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
    for front in worker.fronts(worker.first[0]):
        assert front.values.isfinite().all() and front.log_votes.isfinite().all()
    worker.compactor.execute(worker.second)


def test_the_time_of_all_layers_counts_together() -> None:
    """A part that takes less than the limit for each layer, and more for all of them."""
    worker = Worker("h2o", (150,)).use(failing_policy(merge_fault="sleep_a_little"))
    done = limited(worker, max_bytes=1).execute(worker.first)
    assert isinstance(done.failures[0], PartTimeout)
    worker.use(Worker("h2o", (150,)).config.policy)
    assert not limited(worker).execute(worker.second).failures  # the alarm is off again


def test_what_a_destructor_swallows_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Pytest's own takes so long on a busy machine that the next alarm interrupts it.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)

    class Deaf:
        def __del__(self) -> None:
            time.sleep(0.3)

    with pytest.raises(OutOfTime), time_limit(0.1):
        Deaf()
        time.sleep(5)


@pytest.mark.parametrize(
    ("policy", "is_limited"), [("keepkv", True), ("tova", False), ("adakv", False), ("d2o", False)]
)
def test_nobody_is_interrupted_whom_another_worker_waits_for(policy: str, is_limited: bool) -> None:
    worker = Worker(policy, (150,))
    (one,) = worker.first
    foreign = replace(one, policy=one.policy.model_copy(update={"merger": failing.FailingMerger()}))
    for is_alone in (True, False):
        compactor = limited(worker, is_alone=is_alone)
        left = compactor._batch([foreign], 0).time_left()
        assert (left is not None) == (is_alone or is_limited)
        assert compactor._batch([one], 0).time_left() is None, "our own are not limited"
