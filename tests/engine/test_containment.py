"""One bad request never hurts another: failing parts, extreme parameters and limits, in a running engine."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.conftest import Engine, random_prompt, run
from tests.engine.spread import AtOnce
from tests.policies import failing
from tests.presets import SMALL
from vllm_kvmerge import compression, demo
from vllm_kvmerge.engine.messages import Kind, attached_step
from vllm_kvmerge.engine.metrics import FAILED
from vllm_kvmerge.engine.spreading import STEP_SECONDS, Pace
from vllm_kvmerge.engine.usage import ERROR_KEY, REPORT_KEY
from vllm_kvmerge.evaluation.backends import Answer, EngineBackend, Request, RequestError
from vllm_kvmerge.evaluation.config import EngineOptions
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.spec import CompressionSpec

LENGTH, NUM_TOKENS = 300, 12


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with failing.registered():
        yield


@pytest.fixture
def short_of_time(engine: Engine) -> Iterator[None]:
    """A policy may work for a third of a second."""
    compactor = engine.compression._compactor
    engine.compression._compactor = replace(compactor, max_seconds=0.3, exceeded=Counter())
    yield
    engine.compression._compactor = compactor
    engine.scheduler._admission.refused.clear()


def params(policy: str | None = None, max_tokens: int = NUM_TOKENS, **fields: Any) -> SamplingParams:
    extra = compression(policy, **{"budget": 64} | fields) if policy else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def prompts(seed: int, count: int, length: int = LENGTH) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [random_prompt(rng, length) for _ in range(count)]


def error_of(output: Any) -> str:
    """What is said of a request that has failed."""
    assert output.outputs[0].finish_reason == "error"
    return output.kv_transfer_params[REPORT_KEY][ERROR_KEY]


def test_a_failing_part_ends_its_request_alone(engine: Engine, short_of_time: None) -> None:
    """Every fault, in one batch with requests of every other kind, whose tokens are what they are without."""
    *texts, text = prompts(1, 4)
    others = [params(), params("keepkv"), params("snapkv")]
    expected = engine.tokens(texts, others)
    engine.llm.reset_prefix_cache()
    exceeding = ("sleep", "sleep_a_little", "hold")
    faults = [(field, fault, part) for field, fault, part in failing.FAULTS if fault not in exceeding]
    faults += [("merge_fault", "sleep", "merger:failing")]
    bad = [params(failing.PRESET, **{field: fault}) for field, fault, _ in faults]
    before = {part: FAILED.labels(failing.PRESET, part, 0)._value.get() for *_, part in faults}
    outputs = engine.generate([*texts, *[text] * len(bad)], [*others, *bad])
    assert [list(output.outputs[0].token_ids) for output in outputs[:3]] == expected
    for output, (_, _, part) in zip(outputs[3:], faults, strict=True):
        assert part.replace(":", " ") in error_of(output)
    for part, count in before.items():
        now = FAILED.labels(failing.PRESET, part, 0)._value.get()
        assert now - count == sum(part == blamed for *_, blamed in faults)
    engine.assert_empty()
    assert engine.tokens(texts, others) == expected


def test_an_evaluation_does_not_score_what_failed(engine: Engine) -> None:
    backend = EngineBackend(demo.model_path(), EngineOptions())
    backend._llm = engine.llm
    (prompt,) = prompts(3, 1)
    asked = {
        "failing": {"policy": failing.PRESET, "merge_fault": "raise", "budget": 64},
        "fine": {"policy": "h2o", "budget": 64},
    }
    answers = dict(backend.run((name, Request(prompt, fields, 4, [])) for name, fields in asked.items()))
    assert isinstance(answers["failing"], RequestError) and "merger failing" in str(answers["failing"])
    assert isinstance(answers["fine"], Answer)


@pytest.mark.parametrize("where", ["resolve_capacity", "resolve_budget"])
def test_what_cannot_be_resolved_ends_its_request_alone(engine: Engine, where: str, monkeypatch) -> None:
    resolve = getattr(CompressionSpec, where)

    def overflow(self, *args):
        if self.name == failing.PRESET:
            raise OverflowError("cannot convert float infinity to integer")
        return resolve(self, *args)

    monkeypatch.setattr(CompressionSpec, where, overflow)
    first, second = engine.generate(prompts(2, 2), [params(failing.PRESET), params("h2o")])
    assert "OverflowError" in error_of(first) and second.outputs[0].finish_reason == "length"
    engine.assert_empty()


@pytest.mark.parametrize("fault", ["sleep", "hold"])
def test_a_part_that_exceeds_its_bounds_twice_is_refused(engine: Engine, short_of_time: None, fault: str) -> None:
    """By name, before anything is computed; requests without it go on, and those whose last compression is done."""
    *texts, text = prompts(7, 3)
    bad = params(failing.PRESET, merge_fault=fault, decode="grow")
    some = [params(failing.PRESET, decode="grow"), params("h2o")]
    expected = engine.tokens(texts, some)
    assert "merger failing" in error_of(engine.generate([text], bad)[0])
    assert engine.tokens(texts, some) == expected
    assert "merger failing" in error_of(engine.generate([text], bad)[0])
    refused, alone = engine.generate(texts, some)
    assert "merger:failing is refused" in error_of(refused) and "; allowed: " in error_of(refused)
    assert list(alone.outputs[0].token_ids) == expected[1]
    engine.assert_empty()


def test_requests_that_need_a_refused_part_again_end(engine: Engine, short_of_time: None) -> None:
    """One that has been compressed for the last time goes on; one that would be compressed again does not."""
    *texts, text = prompts(9, 3)
    for decode, prompt in zip(("grow", "bounded"), texts, strict=True):
        engine.add(decode, prompt, params(failing.PRESET, decode=decode, interval=4))
    core = engine.llm.llm_engine
    for _ in range(3):
        core.step()
    for name in ("first", "second"):
        engine.add(name, text, params(failing.PRESET, merge_fault="hold"))
    reasons = {}
    while core.has_unfinished_requests():
        reasons |= {output.request_id: output.outputs[0].finish_reason for output in core.step()}
    assert reasons == {"grow": "length", "bounded": "error", "first": "error", "second": "error"}
    engine.assert_empty()


def noted(engine: Engine, monkeypatch: pytest.MonkeyPatch, what) -> list:
    """From now on, what ``what`` says of each step's output."""
    said: list = []
    schedule = engine.scheduler.schedule

    def schedule_and_note(*args):
        output = schedule(*args)
        said.append(what(output))
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", schedule_and_note)
    return said


def test_what_workers_keep_of_all_requests_is_bounded(engine: Engine, monkeypatch) -> None:
    """Requests whose newest queries find no room wait until others have ended; tokens are the same."""
    scheduler, limits = engine.scheduler, engine.scheduler._admission.limits
    texts, some = prompts(8, 6, 200), params("morphkv", recent_window=48)
    kept = noted(engine, monkeypatch, lambda _: sum(bool(one.kept_bytes) for one in scheduler._states.values()))
    expected = engine.tokens(texts, some)
    assert max(kept) == 6
    kept.clear()
    monkeypatch.setattr(type(limits), "check", lambda *args: None)
    monkeypatch.setattr(scheduler._admission, "limits", replace(limits, max_bytes=limits.ring_bytes(48, 248) // 2))
    assert engine.tokens(texts, some) == expected
    assert max(kept) == 2
    engine.assert_empty()


class Slow(AtOnce):
    """Each compression takes longer than a step may."""

    def seconds(self, kind: Kind, num_entries: int) -> float:
        return 1.0


def test_compressions_of_one_step_share_its_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twelve at once that are too long for a step, a step begins or ends one, and where nobody waits another; tokens
    stay what they are."""
    texts, some = prompts(5, 12), params("rkv", interval=8)
    counts = noted(engine, monkeypatch, lambda output: len(attached_step(output).compress))
    expected = engine.tokens(texts, some)
    assert max(counts) > 2
    counts.clear()
    monkeypatch.setattr(engine.scheduler._planner, "_pace", Slow(1))
    assert engine.tokens(texts, some) == expected
    assert max(counts) <= 2
    engine.assert_empty()


def test_what_a_compressed_request_left_is_never_read(engine: Engine) -> None:
    """NaN in every block that a compressed request gave back: whoever gets one computes as ever."""
    rng = np.random.default_rng(6)
    texts = [random_prompt(rng, int(length)) for length in rng.integers(33, 200, 30)]
    expected = engine.tokens(texts, params())
    engine.llm.reset_prefix_cache()
    engine.generate(prompts(6, 4, 1500), params("h2o", budget=700, interval=4))
    engine.llm.reset_prefix_cache()
    unclean = torch.tensor(sorted(engine.manager._unclean))
    assert len(unclean) > 20
    for pages in engine.compression.compactor.layers:
        pages.keys.index_fill_(0, unclean, torch.nan)
        pages.values.index_fill_(0, unclean, torch.nan)
    # Free blocks are handed out in the order in which they came back: all of them are used.
    for _ in range(3):
        assert engine.tokens(texts, params()) == expected
        engine.llm.reset_prefix_cache()
    assert not engine.manager._unclean
    engine.assert_empty()


@pytest.mark.slow
def test_compressions_after_every_token_wait_for_each_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of every policy, each compressed after every token: together they would take many times what a step has
    room for. A plain request beside them gets a token in each step, and no step is planned longer than allowed."""
    names = sorted(set(PRESETS) - {"kvzip", failing.PRESET})  # whose context is repeated first

    class Paced(AtOnce):
        """The slowest policy takes almost all of a step."""

        def seconds(self, kind: Kind, num_entries: int) -> float:
            number = names.index(json.loads(kind[0])["policy"])
            return 0.9 * STEP_SECONDS * (number + 1) / len(names)

    def step(output: Any) -> tuple[float, int, bool]:
        plans = attached_step(output).compress
        seconds = sum(pace.seconds((plan.compression, 0), plan.new_front) for plan in plans)
        return seconds, len(plans), any(name.startswith("plain") for name in output.num_scheduled_tokens)

    pace, steps = Paced(1), noted(engine, monkeypatch, step)
    monkeypatch.setattr(engine.scheduler._planner, "_pace", pace)
    engine.add("plain", *prompts(10, 1, 150), params(max_tokens=200))
    for text, name in zip(prompts(11, len(names), 65), names, strict=True):
        engine.add(name, text, params(name, 8, **SMALL.get(name, {}), interval=1, decode="bounded"))
    tokens = run(engine)
    assert {name: len(one) for name, one in tokens.items()} == {"plain": 200, **dict.fromkeys(names, 8)}
    assert all(has_plain for *_, has_plain in steps[:200]), "the plain request had to wait for a step"
    assert sum(one for one, *_ in steps) > 5 * STEP_SECONDS and max(count for _, count, _ in steps) > 1
    assert max(one for one, *_ in steps) <= STEP_SECONDS
    engine.assert_empty()


HARMFUL: dict[str, dict[str, Any]] = {
    "grkv, 500 queries": {"policy": "grkv", "regression_window": 500, "budget": 0.25},
    "rkv": {"policy": "rkv", "budget": 0.25},
    "rkv, after every token": {"policy": "rkv", "budget": 3_700, "interval": 1, "decode": "bounded"},
    "cam, 4,096 receivers": {"policy": "cam", "num_receivers": 4096, "budget": 0.6, "merge_prompt": True},
    "zsmerge, behind 100 tokens": {"policy": "zsmerge", "context_tokens": 100, "budget": 40},
}
"""The worst that is known. What they do to others' throughput: ``benchmarks/step_latency.py --harmful``."""


@pytest.mark.slow
@pytest.mark.parametrize("case", HARMFUL)
def test_sixteen_of_the_worst_are_answered_and_others_are_as_ever(engine: Engine, monkeypatch, case: str) -> None:
    """With the pace that workers have, so that compressions are spread as in a server."""
    plain, long = prompts(12, 2, 40), prompts(13, 16, 3_900)
    some = params(max_tokens=100)
    expected = engine.tokens(plain, some)
    monkeypatch.setattr(engine.scheduler._planner, "_pace", Pace(engine.scheduler._admission.limits.num_heads))
    tokens = engine.tokens(plain + long, [some] * 2 + [params(max_tokens=6, **HARMFUL[case])] * 16)
    assert tokens[:2] == expected and all(len(one) == 6 for one in tokens[2:])
    engine.assert_empty()
