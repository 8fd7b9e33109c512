"""Through HTTP: what is too expensive or not allowed is refused, and what fails says which part, alone."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from tests.policies import failing
from tests.server.conftest import Server, check_refused, serving
from tests.server.deaths import kill
from vllm_kvmerge.policies import PRESETS

pytestmark = pytest.mark.engine

ALLOWED = sorted({*PRESETS, failing.PRESET} - {"tova"})
PROMPT = " ".join(f"remember fiso {1000 + i}." for i in range(300)) + " recall fiso"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Little time and memory, all policies but one, and a package whose parts fail."""
    variables = failing.write_package(tmp_path_factory.mktemp("packages") / "site")
    options = ("--max-compaction-seconds", "0.5", "--max-compaction-bytes", str(48 << 20))
    options += "--external-cache-bytes", str(12 << 20), "--external-cache-dir", str(tmp_path_factory.mktemp("external"))
    with serving(*options, "--allowed-policies", *ALLOWED, **variables) as server:
        yield server


def answer(server: Server, compression: dict, **body) -> httpx.Response:
    return server.ask(PROMPT, **{"max_tokens": 8, "kv_compression": compression} | body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("compression", "param", "said"),
    [
        ({"policy": "grkv", "regression_window": 4000}, "", "merger:regression"),
        ({"policy": "tova"}, ".policy", "'tova' is not allowed on this server; allowed: adakv"),
        ({"policy": "cam", "num_receivers": 10**15}, ".num_receivers", "4096, got 1000000000000000"),
        ({"policy": "pyramidkv", "ratio": 1e308}, ".ratio", "1000, got 1e+308"),
    ],
)
def test_refused_at_the_door(strict: Server, compression: dict, param: str, said: str, stream: bool) -> None:
    check_refused(answer(strict, compression, stream=stream), f"kv_compression{param}", said)


def test_a_complete_cache_without_room_is_refused_and_others_are_refreshed(strict: Server) -> None:
    """12 MiB are room for 2,976 tokens of 4,224 bytes each, in whole blocks of 32."""
    fields = {"policy": "h2o", "budget": 128, "refresh": {"every": 16}}
    check_refused(answer(strict, fields, max_tokens=1500), "kv_compression.refresh", "allowed: up to 2976 tokens")
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
        response = httpx.post(strict.url + route, content=digits, headers={"Content-Type": "application/json"})
        assert len(check_refused(response, "kv_compression.num_sink_tokens")) < 600


def test_failing_parts_among_other_requests(strict: Server) -> None:
    """``tests/engine/test_containment.py`` has all faults."""
    faults = [("select_fault", "raise"), ("merge_fault", "nan_rows"), ("merge_fault", "sleep")]
    jobs = [{"policy": failing.PRESET, "budget": 64, field: fault} for field, fault in faults]
    asked = [{"policy": "keepkv", "budget": 64}, {"policy": "full"}] * 4
    expected = [answer(strict, one).json()["choices"] for one in asked]
    with ThreadPoolExecutor(16) as pool:
        failed = [pool.submit(answer, strict, job) for job in jobs]
        streamed = pool.submit(answer, strict, jobs[0], stream=True)
        assert [one.json()["choices"] for one in pool.map(partial(answer, strict), asked)] == expected
    for future, part in zip(failed, ("selector", "merger", "merger"), strict=True):
        check_refused(future.result(), None, f"{part} failing", 500)
    assert "selector failing" in streamed.result().text and '"error"' in streamed.result().text
    for part in ("selector:failing", "merger:failing"):
        labels = {"policy": failing.PRESET, "part": part}
        assert strict.metric("vllm:kvmerge_failed_compactions_total", **labels) == 2
    assert strict.metric("vllm:kvmerge_live_bytes") == 0


def test_a_part_that_exceeds_its_bounds_twice_is_refused(strict: Server) -> None:
    """With what it holds; that it slept in another test counts too."""
    ended, *_, refused = (
        answer(strict, {"policy": failing.PRESET, "budget": 64, "merge_fault": "hold"}) for _ in range(3)
    )
    check_refused(ended, None, "merger failing: held 256.0 MiB, more than", 500)
    check_refused(refused, "kv_compression", "merger:failing is refused until the server is restarted")
    assert answer(strict, {"policy": "keepkv", "budget": 64}).status_code == 200


def test_a_worker_is_killed_while_it_answers(strict: Server) -> None:
    """The last test here."""
    kill(strict, "Worker")
