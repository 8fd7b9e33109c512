"""What ``vllm-kvmerge size`` says, beside what an engine holds."""

import json
import shlex

import numpy as np
import pytest
from vllm import SamplingParams

from tests.documented import ROOT, fences
from tests.engine.conftest import random_prompt
from vllm_kvmerge import compression
from vllm_kvmerge.cli import main
from vllm_kvmerge.engine.accounting import Account
from vllm_kvmerge.engine.sizing import Life, size
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.engine.usage import CacheSize
from vllm_kvmerge.request.spec import CompressionError, parse_compression

pytestmark = pytest.mark.engine

note = Account.note
FIELDS = {
    "one compression": {"policy": "snapkv", "budget": 0.2},
    "bounded": {"policy": "h2o", "budget": 90, "interval": 24, "decode": "bounded"},
    "merged": {"policy": "keepkv", "budget": 128, "interval": 16},
    "constant": {"policy": "morphkv", "budget": 150},
    "a context": {"policy": "keydiff", "budget": 0.3, "context_tokens": 500},
    "chunks": {"policy": "keepkv", "budget": 100, "prefill": {"chunk": 96}},
    "pages of heads": {"policy": "adakv", "budget": 0.25},
    "layers": {"policy": "pyramidkv", "budget": 0.3},
    "refreshes": {"policy": "snapkv", "budget": 80, "window_size": 16, "refresh": {"every": 20}},
    "fewer bits": {"policy": "adakv", "budget": 0.5, "front": "int8"},
    "fewer bits alone": {"policy": "kvzip_once", "budget": 1.0, "front": "int4"},
    "never": {"policy": "snapkv", "budget": 2000},
    "none": None,
}


def generate(engine, requests: list[tuple[int, int]], fields: dict | None) -> int:
    """Sends each when those before have read their prompts. Returns how many ran at once; none may be preempted."""
    core, rng = engine.llm.llm_engine, np.random.default_rng(7)
    waiting, running = list(enumerate(requests)), 0
    while waiting or core.has_unfinished_requests():
        if waiting and all(one.num_output_tokens for one in engine.scheduler.requests.values()):
            number, (context, answer) = waiting.pop(0)
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            params.extra_args = None if fields is None else compression(**fields)
            core.add_request(str(number), {"prompt_token_ids": random_prompt(rng, context)}, params)
        core.step()
        running = max(running, len(engine.scheduler.running))
        assert not any(one.num_preemptions for one in engine.scheduler.requests.values())
    return running


@pytest.mark.thin(6)
@pytest.mark.parametrize("kind", sorted(FIELDS.keys() - {"none"}))
@pytest.mark.parametrize(("context", "answer"), [(700, 70), (513, 1), (640, 33)])
def test_a_request_holds_as_many_blocks(engine, kind, context, answer, monkeypatch):
    fields, seen = FIELDS[kind], list[CacheSize]()
    monkeypatch.setattr(Account, "note", lambda proof, size: seen.append(size) or note(proof, size))
    config = parse_compression(fields)
    _, ours = size(engine.llm.llm_engine.vllm_config, 1 << 30, context, answer, config)
    generate(engine, [(context, answer)], fields)
    engine.assert_empty()
    assert max(one.blocks for one in seen) == ours.life.reading
    generating = [one.blocks for one in seen if one.tokens > config.resolve_context(context)]
    assert max(generating, default=ours.life.generating) == ours.life.generating


def test_bytes_of_a_block_are_the_engines(engine):
    core = engine.llm.llm_engine
    (group,) = engine.scheduler.kv_cache_config.kv_cache_groups
    stock, ours = size(core.vllm_config, 1 << 26, 700, 70, None)
    assert ours.block_bytes == len(group.layer_names) * group.kv_cache_spec.page_size_bytes > stock.block_bytes
    assert ours.num_blocks == (1 << 26) // ours.block_bytes - 1 < stock.num_blocks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["merged", "chunks", "none"])
def test_as_many_requests_fit(engine, kind):
    """Without a preemption, and not one more."""
    fields, (context, answer) = FIELDS[kind], (600, 200)
    config = None if fields is None else parse_compression(fields)
    _, ours = size(engine.llm.llm_engine.vllm_config, 1 << 30, context, answer, config)
    count = 4
    num_blocks = ours.life.reading + (count - 1) * ours.life.generating
    assert ours.life.num_fitting(num_blocks) == count and ours.life.num_fitting(num_blocks - 1) == count - 1
    with engine.with_blocks(num_blocks):
        running = generate(engine, [(context, answer)] * count, fields)
    engine.assert_empty()
    assert running == count


def test_what_is_not_known_is_refused(engine):
    config = engine.llm.llm_engine.vllm_config
    for fields in ({"policy": "keepkv", "budget": 64, "trigger": "pressure"}, {"policy": "kvzip", "budget": 64}):
        with pytest.raises(UnsupportedConfigError, match="depends on the others"):
            size(config, 1 << 30, 700, 70, parse_compression(fields))
    with pytest.raises(UnsupportedConfigError, match=r"--max-model-len allows 4096"):
        size(config, 1 << 30, 4000, 97, None)
    with pytest.raises(CompressionError, match="allowed: "):
        size(config, 1 << 30, 3000, 70, parse_compression({"policy": "grkv", "budget": 900, "num_iters": 1000}))


@pytest.mark.parametrize(("num_blocks", "count"), [(19, 0), (20, 1), (24, 1), (25, 2), (29, 2)])
def test_no_request_fits_where_one_prompt_does_not(num_blocks, count):
    assert Life(reading=20, generating=5).num_fitting(num_blocks) == count


def test_the_command(capsys, monkeypatch):
    """The documented one prints what the documentation says."""
    page = fences(ROOT / "docs/operations.md")
    (at,) = (number for number, (_, text) in enumerate(page) if text.startswith("vllm-kvmerge size"))
    (_, command), (_, printed) = page[at : at + 2]
    monkeypatch.setenv("COLUMNS", "80")
    words = shlex.split(command.replace("\\\n", ""))[1:]
    assert main(words) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == printed.splitlines()
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kvmerge"]["num_requests"] > 3 * found["stock"]["num_requests"] > 0
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    at = words.index("--kv-cache-memory-bytes")
    assert main(words[:at] + words[at + 2 :]) == 2
    assert "--kv-cache-memory-bytes" in capsys.readouterr().err
    assert main([*words, "--context", "0"]) == 2
    assert "--context 0: allowed: 1 or more" in capsys.readouterr().err
