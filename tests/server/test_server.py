"""The real server: real processes, real HTTP, the official client, and Prometheus text."""

import itertools
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests import preloaded
from tests.demo_model import BYTES_PER_BLOCK, HEADS_TIMES_LAYERS
from tests.documented import ROOT, blocks
from tests.server.conftest import VLLM, check_refused, random_prompt, wait_until
from vllm_kvmerge import demo

POLICIES = ["local", "streaming_llm", "h2o", "snapkv", "keepkv", "zsmerge"]
CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_per_request(server, policy):
    def counted(name: str) -> float:
        return server.metric(f"vllm:kvmerge_{name}", policy=policy)

    before = counted("compressions_total")
    body = {"max_tokens": 40, "ignore_eos": True, "kv_compression": {"policy": policy, "budget": 256}}
    answer = server.complete(random_prompt(1, 3000), **body)
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 3000, "completion_tokens": 40}
    after = counted("compressions_total")
    assert after - before == (1 if policy == "snapkv" else 2)
    assert counted("requests_total") >= 1
    assert counted("blocks_freed_total") >= 93 - 9
    assert counted("bytes_freed_total") == counted("blocks_freed_total") * BYTES_PER_BLOCK
    assert counted("compaction_seconds_count") + counted("refresh_seconds_count") == after
    gone = counted("entries_merged_total") + counted("entries_evicted_total")
    assert gone >= (3000 - 256) * HEADS_TIMES_LAYERS


def test_memory_falls_while_the_request_runs(server):
    """The gauges of a long request drop to its share after the prompt, and to nothing at its end."""
    usage, ratio = [], []
    body = {"max_tokens": 600, "ignore_eos": True, "kv_compression": {"policy": "keepkv", "budget": 256}}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, random_prompt(2, 3000), **body)
        while not answer.done():
            usage.append(server.metric("vllm:kv_cache_usage_perc"))
            live = server.metric("vllm:kvmerge_live_entries", policy="keepkv")
            tokens = server.metric("vllm:kvmerge_represented_tokens", policy="keepkv")
            ratio += [live / tokens] if tokens > 3000 else []
    assert answer.result() and ratio and max(ratio) < 0.1
    assert min(filter(None, usage)) <= (256 + 2 * 32) / 32 / (20 * 2**20 // BYTES_PER_BLOCK)
    for gauge in ("kv_cache_usage_perc", "kvmerge_live_bytes", "kvmerge_live_entries"):
        wait_until(lambda g=gauge: server.metric(f"vllm:{g}") == 0)


@pytest.mark.parametrize(("front", "blocks"), [(None, 8), ("int8", 4), ("int4", 3)])
def test_bytes_of_fronts_are_counted_by_their_format(server, front, blocks):
    field, seen = {"policy": "snapkv", "budget": 256, "decode": "grow", "front": front}, set()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            server.complete, random_prompt(2, 1000), max_tokens=300, ignore_eos=True, kv_compression=field
        )
        while not answer.done():
            found = [one for one in server.samples() if one.name == "vllm:kvmerge_front_bytes" and one.value]
            seen |= {(one.labels["format"], one.value) for one in found}
    assert answer.result() and seen == {(front or "cache", blocks * BYTES_PER_BLOCK)}
    wait_until(lambda: server.metric("vllm:kvmerge_front_bytes") == 0)


def test_streams_report_each_step_of_their_own_cache(server):
    """Two at once, one of which is compressed; the official client hands the report on."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    prompt = random_prompt(9, 1500)

    def follow(asks: str | None, field: dict, n: int = 1) -> list[dict]:
        extra = {"ignore_eos": True, "kv_compression": field, "vllm_xargs": {"kvmerge_usage": asks} if asks else None}
        asked = {"max_tokens": 40, "n": n, "stream": True, "extra_body": extra}
        stream = client.completions.create(model="demo", prompt=prompt, **asked)
        params = [getattr(chunk, "kv_transfer_params", None) for chunk in stream]
        return [one["kvmerge"] for one in params if one is not None]

    bounded = {"policy": "h2o", "budget": 96, "interval": 32}
    with ThreadPoolExecutor(2) as pool:
        full, compressed = pool.map(follow, ["stream", "stream"], [{"policy": "full"}, bounded])
    for reports in (full, compressed):
        numbers = [step["step"] for report in reports for step in report["steps"]]
        assert len(reports) > 5 and numbers == sorted(set(numbers))
        assert reports[-1]["steps"][-1]["tokens"] == 1539
        assert "mean_bytes" in reports[-1]
    assert all(step["entries"] == step["tokens"] and "before" not in step for one in full for step in one["steps"])
    decoded = [step for report in compressed for step in report["steps"] if step["tokens"] >= 1500]
    assert all(step["entries"] == 96 + (step["tokens"] - 1500) % 32 for step in decoded)
    events = [step for report in compressed for step in report["steps"] if "before" in step]
    sizes = [(step["tokens"], step["before"]["entries"], step["entries"]) for step in events]
    assert sizes == [(1500, 1500, 96), (1532, 128, 96)]
    assert events[0]["bytes"] == 4 * BYTES_PER_BLOCK
    assert follow(None, bounded) == follow("stream", bounded, n=2) == []


def test_a_bad_request_is_refused_by_name_and_counted(server):
    """More refusals: tests/request and ``test_middleware``. The official client raises its own error."""
    before = server.metric("vllm:kvmerge_rejected_requests_total", reason="budget_too_small")
    field = {"policy": "keepkv", "budget": 64, "window_size": 64}
    for path, content in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
        response = server.post(path, {"model": "demo", "kv_compression": field} | content)
        check_refused(response, "kv_compression.budget")
    assert server.metric("vllm:kvmerge_rejected_requests_total", reason="budget_too_small") == before + 2
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    with pytest.raises(openai.BadRequestError, match="allowed: "):
        client.completions.create(model="demo", prompt="a", extra_body={"kv_compression": {"policy": "lossless"}})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", {"prompt": [2, 20, 30]}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 5, "messages": CHAT}),
    ],
)
def test_a_context_longer_than_the_prompt_is_refused(server, path, content, stream):
    before = server.metric("vllm:kvmerge_rejected_requests_total", reason="context_too_long")
    field = {"policy": "snapkv", "budget": 64, "context_tokens": 100}
    response = server.post(path, {"model": "demo", "stream": stream, "kv_compression": field} | content)
    said = "kv_compression.context_tokens: 100 tokens are more than the prompt has"
    assert check_refused(response, "kv_compression.context_tokens").startswith(said)
    assert server.complete("a", max_tokens=2, kv_compression=field | {"context_tokens": 1})["choices"]
    assert server.metric("vllm:kvmerge_rejected_requests_total", reason="context_too_long") == before + 1


def test_contexts_are_repeated_with_prompts_of_the_models_words(server):
    """The report has the prompts as token ids, and what the budget leaves of the context."""
    prompt, words = random_prompt(10, 1000), "remember gofo . recall"
    tokens = server.post("/tokenize", {"model": "demo", "prompt": words, "add_special_tokens": False}).json()["tokens"]
    field = {"policy": "kvzip", "budget": 0.25, "context_tokens": 960, "chunk_size": 500, "repeat_prompt": words}
    body = {"max_tokens": 8, "ignore_eos": True, "vllm_xargs": {"kvmerge_usage": 1}, "kv_compression": field}
    report = server.complete(prompt, **body)["kv_transfer_params"]["kvmerge"]
    resolved = field | {"repeat_prompt": tokens, "resume_prompt": [], "allocator": "global", "normalized": False}
    assert report["kv_compression"] == report["kv_compression"] | resolved
    # 240 of the context's, its question's 40 and the answer; heads' shares are rounded to pages.
    assert 280 <= report["mean_entries"] < 280 + 8 + 32
    assert report["peak_entries"] == 960  # the question is read when most of them have gone
    for stream in (False, True):
        refused = server.ask(prompt, stream=stream, kv_compression=field | {"repeat_prompt": "Repeat the context."})
        check_refused(refused, "kv_compression.repeat_prompt", "cannot encode 'Repeat the context.'; allowed: ")


def test_clients_that_leave_do_no_harm(server):
    for seed, policy in enumerate(POLICIES):
        field = {"policy": policy, "budget": 128}
        body = {"model": "demo", "prompt": random_prompt(50 + seed, 1000), "max_tokens": 500, "ignore_eos": True}
        asks = {"stream": True, "kv_compression": field, "vllm_xargs": {"kvmerge_usage": "stream"} if seed % 2 else {}}
        with httpx.stream("POST", server.url + "/v1/completions", json=body | asks, timeout=60) as response:
            next(itertools.islice(response.iter_lines(), 10 * seed, None))
    wait_until(lambda: not server.metric("vllm:kv_cache_usage_perc"))
    assert server.complete("recall", max_tokens=2)["choices"]


@pytest.mark.slow
def test_the_documented_command_of_vllms_own_benchmark():
    """By the script for the CPU build. Its requests have no field; the engine's default is theirs."""
    (command,) = blocks(ROOT / "docs/performance.md", "bash")
    words = shlex.split(command.replace("\\\n", "").replace("vllm_kvmerge/demo/model", demo.model_path()))
    small = "--dtype", "float32", "--kv-cache-memory-bytes", str(20 << 20)
    done = preloaded.run([sys.executable, str(VLLM), *words[1:], *small])
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Total num output tokens: +160\s", done.stdout), done.stdout[-3000:]
