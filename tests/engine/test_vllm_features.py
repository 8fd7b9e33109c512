"""Features of vLLM beside compression: each gives what it gives on stock vLLM, or what its request gives alone."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from tests.engine.conftest import Engine, engine_with, in_a_process
from tests.random_model import write_llama
from vllm_kvmerge import compression
from vllm_kvmerge.engine.usage import REPORT_KEY, USAGE_KEY
from vllm_kvmerge.ops.coded import CODINGS
from vllm_kvmerge.request.spec import parse_compression

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK_SIZE, MAX_TOKENS, BUDGET, INTERVAL = 32, 40, 64, 8
PROGRAM = "from tests.engine import test_vllm_features; test_vllm_features.answer_on_stock_vllm()"


def write_byte_tokenizer(folder: Path) -> None:
    """One token per byte, so that any text can be generated, JSON too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_llama(tmp_path_factory.mktemp("bytes"), vocab_size=258, bos_token_id=0, eos_token_id=1)
    write_byte_tokenizer(folder)
    return folder


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,  # or stock vLLM would have to rewind a CPU's generators
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": 64 << 20,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "seed": 0,
    }


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_with(**arguments(folder)) as engine:
        yield engine


def random_text(seed: int, length: int) -> list[int]:
    """Of printable ASCII: behind half a character vLLM would decode all of a prompt with its answer."""
    return [0, *np.random.default_rng(seed).integers(2, 96, length - 1).tolist()]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fiso", "lume"]}, "count": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "count"],
}
STRUCTURED: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": "[a-f]{6}-[0-9]{4}"},
    "choice": {"choice": ["yes", "no", "perhaps"]},
    "grammar": {"grammar": 'root ::= "[" number ("," number){3} "]"\nnumber ::= [1-9] [0-9]?'},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "all_logprobs": {"logprobs": 2, "prompt_logprobs": 2, "temperature": 0.8, "seed": 5},
    "samples": {"n": 3, "temperature": 1.0, "seed": 7, "logprobs": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 11},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": [*range(2, 130)]},
    "stop": {"ignore_eos": False, "stop": [*"abcdefghijklmnopqrst"], "include_stop_str_in_output": True},
    "logit_bias": {"logit_bias": {40: 3.0, 41: 2.5, 42: -100.0}},
    "allowed": {"allowed_token_ids": [*range(60, 90)]},
    "bad_words": {"bad_words": ["a", "b"]},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    **{name: {"structured_outputs": fields, "ignore_eos": False} for name, fields in STRUCTURED.items()},
}
"""Sampling parameters by what they are about."""

PROMPTS = {name: random_text(index, 150 + 13 * index) for index, name in enumerate(OPTIONS)}


def params_of(name: str, **more: Any) -> SamplingParams:
    options = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True} | OPTIONS[name] | more
    if structured := options.pop("structured_outputs", None):
        options["structured_outputs"] = StructuredOutputsParams(**structured)
    return SamplingParams(**options)


def compressed(policy: str, **fields: Any) -> dict[str, Any]:
    fields = {"budget": BUDGET, "interval": INTERVAL} | fields
    return {"extra_args": {**compression(policy, **fields), USAGE_KEY: True}}


def as_json(output: Any) -> list[list[Any]]:
    """What a client is told, and, by themselves, log-probabilities."""
    rows = [*(output.prompt_logprobs or ()), *(row for one in output.outputs for row in one.logprobs or ())]
    answers = [[one.index, list(one.token_ids), one.text, one.finish_reason, one.stop_reason] for one in output.outputs]
    ranks = [[[token, one.rank] for token, one in (row or {}).items()] for row in rows]
    return [answers, ranks, [one.logprob for row in rows for one in (row or {}).values()]]


def assert_same(found: list[list[Any]], expected: list[list[Any]]) -> None:
    """Log probabilities within what the order of additions changes; all else exactly."""
    assert found[:2] == expected[:2]
    assert found[2] == pytest.approx(expected[2], abs=1e-4)


def ask(llm: Any, names: list[str], **more: Any) -> dict[str, Any]:
    prompts = [{"prompt_token_ids": PROMPTS[name]} for name in names]
    params = [params_of(name, **more) for name in names]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return dict(zip(names, outputs, strict=True))


def ask_json(llm: Any, names: list[str], **more: Any) -> dict[str, Any]:
    return {name: as_json(one) for name, one in ask(llm, names, **more).items()}


def search_beams(llm: Any) -> list[list[list[int]]]:
    prompts = [{"prompt_token_ids": PROMPTS[name]} for name in list(PROMPTS)[:3]]
    found = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True))
    return [[list(beam.tokens) for beam in one.sequences] for one in found]


def answer_on_stock_vllm() -> None:
    """The program of a process into which no plugin is loaded."""
    from vllm import LLM

    llm = LLM(**json.load(sys.stdin))
    print("FOUND", json.dumps({"options": ask_json(llm, list(OPTIONS)), "beams": search_beams(llm)}))


@pytest.fixture(scope="module")
def stock(folder: Path) -> dict[str, Any]:
    return in_a_process(["-c", PROGRAM], arguments(folder), is_stock=True)


def test_plain_requests_equal_stock_vllm(engine, stock):
    found = ask_json(engine.llm, list(OPTIONS))
    for name, expected in stock["options"].items():
        assert_same(found[name], expected)
    lengths = {name: len(answers[0][1]) for name, (answers, *_) in found.items()}
    assert 20 <= lengths["min_tokens"] < MAX_TOKENS and lengths["stop"] < MAX_TOKENS  # or nothing was tried
    assert len({tuple(sample[1]) for sample in found["samples"][0]}) == 3
    engine.assert_empty()


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        *((policy, {"decode": "bounded"}) for policy in ("snapkv", "h2o", "keepkv")),
        *(("snapkv", {"front": front}) for front in CODINGS),
    ],
)
def test_compressed_requests_with_every_option(engine, stock, policy, fields):
    """In one batch as alone, within the budget, and as the option demands."""
    assert engine.llm.reset_prefix_cache()
    more, is_bounded = compressed(policy, **fields), "decode" in fields
    together = ask(engine.llm, list(OPTIONS), **more)
    engine.assert_empty()
    told = {name: as_json(output) for name, output in together.items()}
    for name in OPTIONS:
        assert_same(ask_json(engine.llm, [name], **more)[name], told[name])
        if name != "stop":  # text ends it, of which the engine's core knows nothing
            report = together[name].kv_transfer_params[REPORT_KEY]
            assert report["compressions"] > (is_bounded and told[name][0][0][3] == "length"), name
            assert report["mean_entries"] <= BUDGET + (INTERVAL if is_bounded else MAX_TOKENS), name
    changed = [name for name in OPTIONS if told[name][0] != stock["options"][name][0]]
    assert len(changed) > len(OPTIONS) // 2
    # Of a prompt nothing has been left out yet.
    name, expected = "prompt_logprobs", stock["options"]["prompt_logprobs"]
    assert told[name][1] == expected[1] and told[name][2] == pytest.approx(expected[2], abs=1e-4)
    texts = {name: told[name][0][0][2] for name in OPTIONS}
    answer = json.loads(texts["json"])
    assert answer["name"] in ("fiso", "lume") and 10 <= answer["count"] <= 99
    assert re.fullmatch(STRUCTURED["regex"]["regex"], texts["regex"])
    assert texts["choice"] in STRUCTURED["choice"]["choice"] and len(json.loads(texts["grammar"])) == 4
    tokens = {name: told[name][0][0][1] for name in OPTIONS}
    assert len(tokens["min_tokens"]) >= 20 and {*tokens["allowed"]} <= {*range(60, 90)}
    assert 42 not in tokens["logit_bias"] and not {"a", "b"} & {*texts["bad_words"]}
    engine.assert_empty()


def test_beam_search_is_never_compressed(engine, stock, monkeypatch):
    """Each of its steps generates one token, which is there before its cache is compressed: with a default too."""
    assert search_beams(engine.llm) == stock["beams"]
    monkeypatch.setattr(engine.scheduler._admission, "_default", parse_compression({"policy": "h2o", "budget": BUDGET}))
    assert search_beams(engine.llm) == stock["beams"]
    engine.assert_empty()
