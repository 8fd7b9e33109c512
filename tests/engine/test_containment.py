"""One bad request never hurts another: failing parts, extreme parameters and limits, in a running engine."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.conftest import Engine, random_prompt
from tests.engine.spread import AtOnce
from tests.policies import failing
from vllm_kvmerge import compression, demo
from vllm_kvmerge.engine.metrics import FAILED
from vllm_kvmerge.engine.plan import Kind, attached_step
from vllm_kvmerge.engine.usage import ERROR_KEY, REPORT_KEY
from vllm_kvmerge.evaluation.backends import Answer, EngineBackend, Request, RequestError
from vllm_kvmerge.evaluation.config import EngineOptions
from vllm_kvmerge.policies import PARTS, PRESETS
from vllm_kvmerge.request.parameters import CompressionError, parse_compression, request_schema

LENGTH, NUM_TOKENS = 300, 12


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with failing.registered():
        yield


@pytest.fixture
def short_of_time(engine: Engine) -> Iterator[None]:
    """A policy may work for a third of a second."""
    compression_state = _compression(engine)
    compactor = compression_state._compactor
    compression_state._compactor = replace(compactor, max_seconds=0.3, exceeded=Counter())
    yield
    compression_state._compactor = compactor
    engine.scheduler._refused.clear()


def _compression(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.compression


def params(extra: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=extra, **fields)


def test_a_failing_part_ends_its_request_alone(engine: Engine, short_of_time: None) -> None:
    """Every fault, in one batch with requests of every other kind, whose tokens are what they are without."""
    rng = np.random.default_rng(1)
    prompts = [random_prompt(rng, LENGTH) for _ in range(4)]
    others = [params(), params(compression("keepkv", budget=64)), params(compression("snapkv", budget=64))]
    expected = engine.tokens(prompts[:3], others)
    engine.llm.reset_prefix_cache()
    exceeding = ("sleep", "sleep_a_little", "hold")
    faults = [(field, fault, part) for field, fault, part in failing.FAULTS if fault not in exceeding]
    faults += [("merge_fault", "sleep", "merger:failing")]
    bad = [params(compression(failing.PRESET, budget=64, **{field: fault})) for field, fault, _ in faults]
    before = {part: FAILED.labels(failing.PRESET, part, 0)._value.get() for *_, part in faults}
    outputs = engine.generate([*prompts[:3], *[prompts[3]] * len(bad)], [*others, *bad])
    assert [list(output.outputs[0].token_ids) for output in outputs[:3]] == expected
    for output, (_, fault, part) in zip(outputs[3:], faults, strict=True):
        assert output.outputs[0].finish_reason == "error", fault
        assert part.replace(":", " ") in output.kv_transfer_params[REPORT_KEY][ERROR_KEY]
    for part, count in before.items():
        now = FAILED.labels(failing.PRESET, part, 0)._value.get()
        assert now - count == sum(part == blamed for *_, blamed in faults)
    engine.assert_empty()
    assert engine.tokens(prompts[:3], others) == expected


def test_an_evaluation_does_not_score_what_failed(engine: Engine) -> None:
    backend = EngineBackend(demo.model_path(), EngineOptions())
    backend._llm = engine.llm
    prompt = random_prompt(np.random.default_rng(3), LENGTH)
    asked = {
        "failing": {"policy": failing.PRESET, "merge_fault": "raise", "budget": 64},
        "fine": {"policy": "h2o", "budget": 64},
    }
    answers = dict(backend.run((name, Request(prompt, fields, 4, [])) for name, fields in asked.items()))
    assert isinstance(answers["failing"], RequestError) and "merger failing" in str(answers["failing"])
    assert isinstance(answers["fine"], Answer)


@pytest.mark.parametrize("where", ["resolve_capacity", "resolve_budget"])
def test_what_cannot_be_resolved_ends_its_request_alone(engine: Engine, where: str, monkeypatch) -> None:
    from vllm_kvmerge.request.parameters import CompressionConfig

    resolve = getattr(CompressionConfig, where)

    def overflow(self, *args):
        if self.name == failing.PRESET:
            raise OverflowError("cannot convert float infinity to integer")
        return resolve(self, *args)

    monkeypatch.setattr(CompressionConfig, where, overflow)
    rng = np.random.default_rng(2)
    prompts = [random_prompt(rng, LENGTH) for _ in range(2)]
    bad, good = params(compression(failing.PRESET, budget=64)), params(compression("h2o", budget=64))
    first, second = engine.generate(prompts, [bad, good])
    assert first.outputs[0].finish_reason == "error"
    assert "OverflowError" in first.kv_transfer_params[REPORT_KEY][ERROR_KEY]
    assert second.outputs[0].finish_reason == "length"
    (alone,) = engine.generate([prompts[0]], bad)
    assert alone.outputs[0].finish_reason == "error"
    engine.assert_empty()


def _numbers() -> Iterator[tuple[dict[str, str], str, dict[str, Any]]]:
    """(request, field, schema) of every number that a request can give, from the schema that clients see."""
    seen = set()
    for request, properties in _described():
        for field, described in properties.items():
            for option in described.get("anyOf", [described]):
                if option.get("type") in ("integer", "number") and (field, repr(option)) not in seen:
                    seen.add((field, repr(option)))
                    yield request, field, option


def _described() -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Every preset and its fields, and every part that no preset uses, in the first that it goes with."""
    schema = request_schema()
    for policy in PRESETS:
        reference = schema["discriminator"]["mapping"][policy]
        yield {"policy": policy}, schema["$defs"][reference.rpartition("/")[2]]["properties"]
    for kind, parts in PARTS.items():
        for name, part in parts.items():
            if all(getattr(preset, kind) != name for preset in PRESETS.values()):
                yield _first_fit(kind, name), part.model_json_schema().get("properties", {})


def _first_fit(kind: str, name: str) -> dict[str, str]:
    for policy in PRESETS:
        try:
            parse_compression({"policy": policy, kind: name})
        except CompressionError:
            continue
        return {"policy": policy, kind: name}
    raise AssertionError(f"{kind} {name} goes with no preset")


def _extremes(option: dict[str, Any]) -> list[Any]:
    """Least and most, beyond both, and what no arithmetic survives."""
    low = option.get("minimum", option.get("exclusiveMinimum"))
    high = option.get("maximum", option.get("exclusiveMaximum"))
    assert low is not None and high is not None and math.isfinite(low) and math.isfinite(high), option
    beyond = [10**18, -(10**18), 10**400, 1e308, -1e308, math.inf]
    if option["type"] == "integer":
        return [low, high, low - 1, high + 1, *beyond]
    inside = [math.nextafter(low, high), math.nextafter(high, low), (low + high) / 2]
    return [low, high, *inside, math.nextafter(low, -math.inf), math.nextafter(high, math.inf), *beyond]


@pytest.mark.slow
def test_extremes_of_every_number_are_refused_or_answered(engine: Engine) -> None:
    """Generated from the schema. Whatever is accepted is served, together, and the next request is as ever."""
    rng = np.random.default_rng(3)
    prompt, plain = random_prompt(rng, LENGTH), random_prompt(rng, LENGTH)
    expected = engine.tokens([plain], params())
    accepted, refused = [], 0
    for chosen, field, option in _numbers():
        for value in _extremes(option):
            request = {**chosen, "budget": 64, field: value}
            extra = {"kv_compression": json.dumps(request)}
            try:
                config = parse_compression(extra["kv_compression"])
                config.check_prompt(LENGTH)
            except CompressionError as error:
                assert error.status == 400 and len(str(error)) < 2000
                refused += 1
            else:
                accepted.append((request, params(extra)))
    assert len(accepted) > 60 and refused > 300
    reasons = []
    for start in range(0, len(accepted), 24):
        some = accepted[start : start + 24]
        for (request, _), output in zip(
            some, engine.generate([prompt] * len(some), [given for _, given in some]), strict=True
        ):
            reason = output.outputs[0].finish_reason
            reasons.append(reason)
            # Refused by the engine, as too expensive or impossible with this prompt: never because something broke.
            if reason == "error":
                error = output.kv_transfer_params[REPORT_KEY][ERROR_KEY]
                assert error.startswith("kv_compression") and "allowed" in error, (request, error)
            else:
                assert reason == "length", request
    assert reasons.count("length") > len(reasons) // 2
    engine.assert_empty()
    assert engine.tokens([plain], params()) == expected


@pytest.mark.parametrize("fault", ["sleep", "hold"])
def test_a_part_that_exceeds_its_bounds_twice_is_refused(engine: Engine, short_of_time: None, fault: str) -> None:
    """By name, before anything is computed; requests without it go on, and those whose last compression is done."""
    rng = np.random.default_rng(7)
    prompts = [random_prompt(rng, LENGTH) for _ in range(4)]
    bad = params(compression(failing.PRESET, budget=64, merge_fault=fault, decode="grow"))
    good, fine = params(compression(failing.PRESET, budget=64, decode="grow")), params(compression("h2o", budget=64))
    expected = engine.tokens(prompts[:2], [good, fine])
    for number in range(2):
        (failed,) = engine.generate(prompts[2:3], bad)
        assert failed.outputs[0].finish_reason == "error"
        assert "merger failing" in failed.kv_transfer_params[REPORT_KEY][ERROR_KEY]
        if number == 0:
            assert engine.tokens(prompts[:2], [good, fine]) == expected
    refused, alone = engine.generate(prompts[:2], [good, fine])
    assert refused.outputs[0].finish_reason == "error"
    message = refused.kv_transfer_params[REPORT_KEY][ERROR_KEY]
    assert "merger:failing is refused" in message and "; allowed: " in message
    assert list(alone.outputs[0].token_ids) == expected[1]
    engine.assert_empty()


def test_requests_that_need_a_refused_part_again_end(engine: Engine, short_of_time: None) -> None:
    """One that has been compressed for the last time goes on; one that would be compressed again does not."""
    rng = np.random.default_rng(9)
    prompts = [random_prompt(rng, LENGTH) for _ in range(3)]
    grows, bounded = (
        params(compression(failing.PRESET, budget=64, decode=decode, interval=4)) for decode in ("grow", "bounded")
    )
    bad = params(compression(failing.PRESET, budget=64, merge_fault="hold"))
    core = engine.llm.llm_engine
    for name, prompt, some in zip(("grows", "bounded"), prompts, (grows, bounded), strict=False):
        core.add_request(name, {"prompt_token_ids": prompt}, some)
    for _ in range(3):
        core.step()
    for name in ("first", "second"):
        core.add_request(name, {"prompt_token_ids": prompts[2]}, bad)
    reasons = {}
    while core.has_unfinished_requests():
        reasons |= {output.request_id: output.outputs[0].finish_reason for output in core.step()}
    assert reasons == {"grows": "length", "bounded": "error", "first": "error", "second": "error"}
    engine.assert_empty()


def test_what_workers_keep_of_all_requests_is_bounded(engine: Engine, monkeypatch) -> None:
    """Requests whose newest queries find no room wait until others have ended; tokens are the same."""
    scheduler, limits = engine.scheduler, engine.scheduler._limits
    rng = np.random.default_rng(8)
    prompts = [random_prompt(rng, 200) for _ in range(6)]
    requests = [params(compression("morphkv", budget=64, recent_window=48)) for _ in prompts]
    kept: list[int] = []
    schedule = scheduler.schedule

    def noted(*args):
        output = schedule(*args)
        kept.append(len(scheduler._kept_bytes))
        return output

    monkeypatch.setattr(scheduler, "schedule", noted)
    expected = engine.tokens(prompts, requests)
    assert max(kept) == 6
    kept.clear()
    one = limits.ring_bytes(48, 248)
    monkeypatch.setattr(type(limits), "check", lambda *args: None)
    monkeypatch.setattr(scheduler, "_limits", replace(limits, max_bytes=one // 2))
    assert engine.tokens(prompts, requests) == expected
    assert max(kept) == 2
    assert not scheduler._kept_bytes
    engine.assert_empty()


def test_limits_hold_in_the_engine_too(engine: Engine) -> None:
    """Offline there is no front end to refuse what is too expensive."""
    scheduler, limits = engine.scheduler, engine.scheduler._limits
    rng = np.random.default_rng(4)
    prompts = [random_prompt(rng, LENGTH) for _ in range(2)]
    scheduler._limits = replace(limits, max_bytes=1000)
    try:
        refused, plain = engine.generate(prompts, [params(compression("h2o", budget=64)), params()])
    finally:
        scheduler._limits = limits
    assert refused.outputs[0].finish_reason == "error" and plain.outputs[0].finish_reason == "length"
    assert "--max-compaction-bytes" in refused.kv_transfer_params[REPORT_KEY][ERROR_KEY]
    engine.assert_empty()


class Slow(AtOnce):
    """Each compression takes longer than a step may."""

    def seconds(self, kind: Kind, num_entries: int) -> float:
        return 1.0


def test_compressions_of_one_step_share_its_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twelve at once that are too long for a step, a step begins or ends one, and where nobody waits another; tokens
    stay what they are."""
    scheduler = engine.scheduler
    rng = np.random.default_rng(5)
    prompts = [random_prompt(rng, LENGTH) for _ in range(12)]
    requests = [params(compression("rkv", budget=64, interval=8)) for _ in prompts]
    counts: list[int] = []
    schedule = scheduler.schedule

    def counted(*args):
        output = schedule(*args)
        counts.append(len(attached_step(output).plans))
        return output

    monkeypatch.setattr(scheduler, "schedule", counted)
    expected = engine.tokens(prompts, requests)
    together = max(counts)
    counts.clear()
    monkeypatch.setattr(scheduler, "_pace", Slow(1))
    assert engine.tokens(prompts, requests) == expected
    assert together > 2 and max(counts) <= 2
    engine.assert_empty()


def test_what_a_compressed_request_left_is_never_read(engine: Engine) -> None:
    """NaN in every block that a compressed request gave back: whoever gets one computes as ever."""
    rng = np.random.default_rng(6)
    prompts = [random_prompt(rng, int(length)) for length in rng.integers(33, 200, 30)]
    expected = engine.tokens(prompts, params())
    engine.llm.reset_prefix_cache()
    long = [random_prompt(rng, 1500) for _ in range(4)]
    engine.generate(long, params(compression("h2o", budget=700, interval=4)))
    engine.llm.reset_prefix_cache()
    unclean = torch.tensor(sorted(engine.manager._unclean))
    assert len(unclean) > 20
    for pages in _compression(engine).compactor.layers:
        pages.keys.index_fill_(0, unclean, torch.nan)
        pages.values.index_fill_(0, unclean, torch.nan)
    # Free blocks are handed out in the order in which they came back: all of them are used.
    for _ in range(3):
        assert engine.tokens(prompts, params()) == expected
        engine.llm.reset_prefix_cache()
    assert not engine.manager._unclean
    engine.assert_empty()
