"""Situations in which other caches of vLLM's were found wrong: preemption by priority, a pause that discards the cache,
texts that end an answer, long repetitions in half precision, and unusual heads and blocks."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.conftest import Engine, engine_with, preempt_all, run
from tests.engine.test_speculative import SPECULATION, forget_numba, with_drafts
from tests.engine.test_vllm_features import arguments, compressed, random_text, write_byte_tokenizer
from tests.random_model import write_llama
from vllm_kvmerge import compression, demo
from vllm_kvmerge.engine.usage import REPORT_KEY
from vllm_kvmerge.ops import OPERATORS
from vllm_kvmerge.policies import MERGERS, PRESETS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{90}$"}, "count": {"enum": [1, 2, 3]}},
    "required": ["name", "count"],
}


@contextmanager
def running(folder: Path, config: dict[str, Any] | None = None, **others: Any) -> Iterator[Engine]:
    own = {"additional_config": {"kvmerge": config}} if config else {}
    forget_numba()  # which another file may have imported for its drafts
    with engine_with(**arguments(folder) | own | others) as engine:
        yield engine


def folder_of(where: Path, **sizes: Any) -> Path:
    folder = write_llama(where, vocab_size=258, bos_token_id=0, eos_token_id=1, **sizes)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module", params=[False, True], ids=["", "drafts"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    others: dict[str, Any] = {"scheduling_policy": "priority", "max_num_batched_tokens": 512}
    if not request.param:
        with running(folder, **others) as engine:
            yield engine
    else:
        with with_drafts(), running(folder, **others, speculative_config=SPECULATION) as engine:
            yield engine


def jobs() -> list[tuple[list[int], SamplingParams]]:
    """Half of the answers are JSON, half go on for at least some tokens; one request of four is not compressed."""
    found = []
    for index, policy in enumerate(["snapkv", "keepkv", "h2o", None, "morphkv", "zsmerge", "weightedkv", None]):
        decode = "grow" if index < 4 else "bounded"  # the one needs more and more blocks, the other up to 4
        more: dict[str, Any] = compressed(policy, decode=decode, interval=64) if policy else {}
        if index % 2:
            more["structured_outputs"] = StructuredOutputsParams(json=SCHEMA)
        params = SamplingParams(temperature=0, max_tokens=130, min_tokens=20 if index % 2 else 100, **more)
        found.append((random_text(index, 90 + 10 * index), params))
    return found


def submit(engine: Engine, index: int, prompt: list[int], params: SamplingParams, priority: int = 0) -> None:
    engine.llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params, priority=priority)


def alone(engine: Engine) -> list[list[int]]:
    """What each request generates by itself."""
    found = []
    for index, (prompt, params) in enumerate(jobs()):
        submit(engine, index, prompt, params)
        found.append(run(engine)[str(index)])
        assert engine.llm.reset_prefix_cache()
    return found


def test_preempted_again_and_again_by_priority(engine):
    expected = alone(engine)
    preemptions: Counter[str] = Counter()
    steps = count(1)

    def watch() -> None:
        if next(steps) % 40 == 0:  # besides those that the small pool brings about
            preempt_all(engine)
        for one in engine.scheduler.requests.values():
            preemptions[one.request_id] = one.num_preemptions

    tokens: dict[str, list[int]] = {}
    with engine.with_blocks(17):
        # Each is more urgent than those before it, and comes when they are generating.
        for index, (prompt, params) in enumerate(jobs()):
            submit(engine, index, prompt, params, priority=-index)
            for _ in range(3):
                for output in engine.llm.llm_engine.step():
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
                watch()
        tokens |= run(engine, watch)
    assert [tokens[str(index)] for index in range(len(expected))] == expected
    assert preemptions.total() >= 8 and max(preemptions.values()) >= 2
    tokenizer = engine.llm.get_tokenizer()
    for index in range(1, 8, 2):
        text = tokenizer.decode(tokens[str(index)], skip_special_tokens=True)
        assert len(json.loads(text)["name"]) == 90
    assert min(len(tokens[str(index)]) for index in range(0, 8, 2)) >= 100
    assert engine.llm.reset_prefix_cache()
    engine.assert_empty()


@pytest.mark.parametrize("level", [0, 1])
def test_a_pause_that_discards_the_cache_changes_no_answer(engine, level):
    expected, core = alone(engine), engine.llm.llm_engine
    with engine.sharing_contexts() as fronts:
        for index, (prompt, params) in enumerate(jobs()):
            submit(engine, index, prompt, params)
        tokens: dict[str, list[int]] = {}
        for pause in (12, 15, 20):
            for _ in range(pause):
                for output in core.step():
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
            core.sleep(level=level, mode="keep")
            assert level == 0 or len(fronts) == 0
            core.wake_up(["scheduling"] if level == 0 else None)
        tokens |= run(engine)
    assert [tokens[str(index)] for index in range(len(expected))] == expected
    engine.assert_empty()


def test_a_pause_that_aborts_leaves_nothing(engine):
    for index, (prompt, params) in enumerate(jobs()):
        submit(engine, index, prompt, params)
    for _ in range(12):
        engine.llm.llm_engine.step()
    engine.llm.llm_engine.sleep(level=1, mode="abort")
    with pytest.raises(RuntimeError, match="release_kv_cache_memory"):  # a worker on CPU has no such memory
        engine.llm.llm_engine.release_kv_cache_memory()
    engine.llm.llm_engine.wake_up()
    for index, _ in enumerate(jobs()):
        engine.llm.llm_engine.abort_request([str(index)])
    run(engine)
    engine.assert_empty()


@pytest.mark.parametrize("policy", ["keepkv", "streaming_llm", "h2o"])
def test_a_text_ends_an_answer_whose_positions_are_the_caches(engine, policy):
    prompt, more = random_text(77, 300), compressed(policy, decode="bounded", positions="cache")
    (whole,) = engine.llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=80, **more))
    text = whole.outputs[0].text
    stop = text[41:44]
    params = SamplingParams(temperature=0, max_tokens=80, stop=[stop], **more)
    (ended,) = engine.llm.generate([{"prompt_token_ids": prompt}], params)
    assert ended.outputs[0].text == text[: text.index(stop)] and ended.outputs[0].stop_reason == stop
    assert engine.llm.reset_prefix_cache()
    engine.assert_empty()


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(80, 32), (96, 64), (256, 32), (256, 128)], ids=lambda size: str(size)
)
def test_heads_and_blocks_of_other_sizes(tmp_path, head_dim, block_size):
    """As by PyTorch's operators, alone and in company."""
    folder, found = folder_of(tmp_path, head_dim=head_dim), []
    for config in ({}, {"operators": dict.fromkeys(OPERATORS, "reference")}):
        with running(folder, config, block_size=block_size) as engine:
            found.append(alone(engine))
            prompts, params = zip(*jobs(), strict=True)
            assert engine.tokens(list(prompts), list(params)) == found[-1]
            engine.assert_empty()
    assert found[0] == found[1]


MERGING = sorted(name for name, preset in PRESETS.items() if preset.merger != "drop")


def test_long_repetitions_in_half_precision():
    """Keys that are all alike, and every merger: nothing overflows, and the answers have probabilities."""
    own = {"dtype": "float16", "max_model_len": 4096, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    prompts = {
        "one": [2] + [300] * 3000,
        "two": [2] + [300, 301] * 1500,
        "late": [2] + [300] * 2900 + [*range(310, 400)],
    }
    fields = [{"policy": name} for name in MERGING]
    fields += [{"policy": "snapkv", "merger": name} for name in sorted(MERGERS) if name != "drop"]
    with engine_with(model=demo.model_path(), **own) as engine:
        for prompt in prompts.values():
            for field in fields:
                try:
                    asked = compression(**{"budget": 128, "decode": "bounded", "interval": 8} | field)
                except ValueError:
                    asked = compression(**{"budget": 128} | field)  # of the prompt alone
                params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1, extra_args=asked)
                (output,) = engine.generate([prompt], params)
                assert "error" not in ((output.kv_transfer_params or {}).get(REPORT_KEY) or {}), field
                likely = [max(one.logprob for one in row.values()) for row in output.outputs[0].logprobs]
                assert len(likely) == 40 and all(-20 < one <= 0 for one in likely), field
        assert engine.llm.reset_prefix_cache()
        engine.assert_empty()
