"""Through HTTP: what is too expensive or not allowed is refused, and what fails says which part, alone."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tests.policies import failing
from tests.server.conftest import Server, serving
from tests.server.deaths import ask_for_long, kill
from vllm_kvmerge.policies import PRESETS

pytestmark = pytest.mark.engine

ALLOWED = sorted({*PRESETS, failing.PRESET} - {"tova"})
PROMPT = " ".join(f"remember fiso {1000 + i}." for i in range(300)) + " recall fiso"


CONTEXTS = "/v1/kvmerge/contexts"


@pytest.fixture(scope="module")
def saved(server: Server, contexts_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A context that another server has kept and saved: as it was shown, what it was asked, and the folder."""
    body = {"model": "demo", "prompt": PROMPT, "kv_compression": {"policy": "h2o", "budget": 64}}
    shown = server.post(CONTEXTS, body).json()
    address = f"{CONTEXTS}/{shown['id']}"
    folder = tmp_path_factory.mktemp("saved") / "contexts"
    shutil.copytree(contexts_dir, folder)
    asked = ask_context(server, shown["id"])
    assert httpx.delete(server.url + address).status_code == 200
    return SimpleNamespace(shown=shown, address=address, asked=asked, folder=folder)


def ask_context(server: Server, name: str) -> dict:
    body = {"prompt": " recall fiso", "logprobs": 1, "max_tokens": 40, "ignore_eos": True}
    return server.complete(**body, kv_compression={"context": name})["choices"][0]


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, saved: SimpleNamespace) -> Iterator[Server]:
    """Little time and memory, all policies but one, a package whose parts fail, and a context from a file."""
    variables = failing.write_package(tmp_path_factory.mktemp("packages") / "site")
    options = ("--max-compaction-seconds", "0.5", "--max-compaction-bytes", str(48 << 20))
    options += "--external-cache-bytes", str(12 << 20), "--external-cache-dir", str(tmp_path_factory.mktemp("external"))
    options += "--kvmerge-contexts", str(saved.folder)
    with serving(*options, "--allowed-policies", *ALLOWED, **variables) as server:
        yield server


def answer(server: Server, compression: dict, **body) -> httpx.Response:
    return server.post(
        "/v1/completions",
        {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "kv_compression": compression, **body},
    )


@pytest.mark.slow
def test_a_saved_context_is_there_after_a_restart(strict: Server, saved: SimpleNamespace) -> None:
    """With its answers, until it is deleted."""
    assert httpx.get(strict.url + saved.address).json() == saved.shown | {"seconds": None}
    before = strict.metric("vllm:kvmerge_context_hit_tokens_total")
    assert ask_context(strict, saved.shown["id"]) == saved.asked
    assert strict.metric("vllm:kvmerge_context_hit_tokens_total") == before + saved.shown["tokens"]
    assert httpx.delete(strict.url + saved.address).status_code == 200
    assert httpx.get(strict.url + saved.address).status_code == 404 and not list(saved.folder.iterdir())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("compression", "param", "said"),
    [
        (
            {"policy": "grkv", "regression_window": 4000},
            "kv_compression",
            ["merger:regression"],
        ),
        ({"policy": "tova"}, "kv_compression.policy", ["'tova' is not allowed", "allowed: adakv"]),
        ({"policy": "snapkv", "context_tokens": 100_000}, "kv_compression.context_tokens", ["more than the prompt"]),
        ({"policy": "cam", "num_receivers": 10**15}, "kv_compression.num_receivers", ["4096", "1000000000000000"]),
        ({"policy": "h2o", "refresh": {"every": 0}}, "kv_compression.refresh.every", ["equal to 1", "got 0"]),
        ({"policy": "h2o", "refresh": {"every": 8, "at": 9}}, "kv_compression.refresh.at", ["allowed: every, queries"]),
        ({"policy": "pyramidkv", "ratio": 1e308}, "kv_compression.ratio", ["1000", "1e+308"]),
    ],
)
def test_refused_at_the_door(strict: Server, compression: dict, param: str, said: list[str], stream: bool) -> None:
    response = answer(strict, compression, stream=stream)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["type"] == "BadRequestError"
    for words in [*said, "allowed" if param.endswith(("policy", "compression")) else ""]:
        assert words in error["message"]


def test_a_complete_cache_without_room_is_refused_and_others_are_refreshed(strict: Server) -> None:
    """12 MiB are room for 2,976 tokens of 4,224 bytes each, in whole blocks of 32."""
    fields = {"policy": "h2o", "budget": 128, "refresh": {"every": 16}}
    refused = answer(strict, fields, max_tokens=1500)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "kv_compression.refresh"
    assert "allowed: up to 2976 tokens" in refused.json()["error"]["message"]
    assert strict.metric("vllm:kvmerge_rejected_requests_total", reason="no_external_room") == 1
    report = answer(strict, fields, max_tokens=60, ignore_eos=True, vllm_xargs={"kvmerge_usage": 1})
    assert report.status_code == 200, report.text
    usage = report.json()["kv_transfer_params"]["kvmerge"]
    assert usage["refreshes"] == 59 // 16 and usage["external_bytes"] > 0
    labels = {"policy": "h2o"}
    assert strict.metric("vllm:kvmerge_refreshes_total", **labels) == 59 // 16
    assert strict.metric("vllm:kvmerge_refresh_seconds_count", **labels) == 59 // 16
    assert strict.metric("vllm:kvmerge_external_bytes", **labels) == 0


def test_what_is_allowed_is_listed(strict: Server) -> None:
    catalogue = httpx.get(strict.url + "/kvmerge/policies", timeout=60).json()
    assert {preset["name"] for preset in catalogue["presets"]} == {"full", *ALLOWED}
    schema = httpx.get(strict.url + "/openapi.json", timeout=60).json()["components"]["schemas"]
    field = schema["CompletionRequest"]["properties"]["kv_compression"]
    assert set(field["anyOf"][0]["discriminator"]["mapping"]) == {"full", *ALLOWED}


def test_a_number_of_400_digits_is_refused(strict: Server) -> None:
    body = json.dumps({"model": "demo", "prompt": "x", "kv_compression": {"policy": "h2o", "num_sink_tokens": 7}})
    for route in ("/v1/completions", "/invocations"):
        digits = body.replace(": 7", ": " + "7" * 400)
        headers = {"Content-Type": "application/json"}
        response = httpx.post(strict.url + route, content=digits, headers=headers, timeout=60)
        assert response.status_code == 400 and len(response.text) < 600
        assert response.json()["error"]["param"] == "kv_compression.num_sink_tokens"


def test_failing_parts_among_other_requests(strict: Server) -> None:
    """Twenty requests at once, a third of them with parts that fail: those say which, the others are answered."""
    good = answer(strict, {"policy": "keepkv", "budget": 64}).json()["choices"][0]["text"]
    plain = strict.complete(PROMPT, max_tokens=8)["choices"][0]["text"]
    faults = [fault for fault in failing.FAULTS if fault[1] not in ("sleep", "hold", "sleep_a_little")]
    faults += [fault for fault in failing.FAULTS if fault[1] == "sleep"]
    jobs = [{"policy": failing.PRESET, "budget": 64, field: value} for field, value, _ in faults]
    with ThreadPoolExecutor(32) as pool:
        failed = [pool.submit(answer, strict, job) for job in jobs]
        fine = [pool.submit(answer, strict, {"policy": "keepkv", "budget": 64}) for _ in range(6)]
        untouched = [pool.submit(strict.complete, PROMPT, max_tokens=8) for _ in range(6)]
        streamed = pool.submit(answer, strict, jobs[0], stream=True)
    for future, (_, _, part) in zip(failed, faults, strict=True):
        response = future.result()
        assert response.status_code == 500, response.text
        assert part.replace(":", " ") in response.json()["error"]["message"]
    assert "selector failing" in streamed.result().text and '"error"' in streamed.result().text
    assert {future.result().json()["choices"][0]["text"] for future in fine} == {good}
    assert {future.result()["choices"][0]["text"] for future in untouched} == {plain}
    for part in ("selector:failing", "merger:failing"):
        # The stream is one more.
        count = sum(blamed == part for *_, blamed in faults) + (part == "selector:failing")
        labels = {"policy": failing.PRESET, "part": part}
        assert strict.metric("vllm:kvmerge_failed_compactions_total", **labels) == count
    assert strict.metric("vllm:kvmerge_live_bytes") == 0
    assert answer(strict, {"policy": "keepkv", "budget": 64}).json()["choices"][0]["text"] == good


def test_a_part_that_exceeds_its_bounds_again_is_refused(strict: Server) -> None:
    """It has slept once: what holds too much now is the second time."""
    job = {"policy": failing.PRESET, "budget": 64, "merge_fault": "hold"}
    ended, refused = (answer(strict, job) for _ in range(2))
    assert ended.status_code == 500 and "merger failing: held 256.0 MiB, more than" in ended.json()["error"]["message"]
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "kv_compression"
    assert "merger:failing is refused until the server is restarted" in error["message"]
    assert answer(strict, {"policy": "keepkv", "budget": 64}).status_code == 200


def test_a_worker_is_killed_while_it_answers(strict: Server) -> None:
    """The last test here."""
    asker = ask_for_long(strict)
    kill(strict, "Worker")
    asker.check_told()
