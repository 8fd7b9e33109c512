"""Through HTTP: what is too expensive or not allowed is refused, and what fails says which part, alone."""

from collections.abc import Iterator

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
    with serving(*options, "--head-budgets", "demo", "--allowed-policies", *ALLOWED, **variables) as server:
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
        ({"policy": "h2o", "num_sink_tokens": 7 * 10**400}, ".num_sink_tokens", ""),
    ],
)
def test_refused_at_the_door(strict: Server, compression: dict, param: str, said: str, stream: bool) -> None:
    message = check_refused(answer(strict, compression, stream=stream), f"kv_compression{param}", said)
    assert len(message) < 600


def test_a_complete_cache_without_room_is_refused_and_others_are_refreshed(strict: Server) -> None:
    """12 MiB are room for 2,976 tokens of 4,224 bytes each, in whole blocks of 32."""
    fields = {"policy": "h2o", "budget": 128, "refresh": {"every": 16}}
    check_refused(answer(strict, fields, max_tokens=1500), "kv_compression.refresh", "allowed: up to 2976 tokens")
    assert strict.metric("vllm:kvmerge_rejected_requests_total", reason="no_external_room") == 1
    report = answer(strict, fields, max_tokens=60, ignore_eos=True, vllm_xargs={"kvmerge_usage": 1})
    assert report.status_code == 200, report.text
    usage = report.json()["kv_transfer_params"]["kvmerge"]
    assert usage["refreshes"] == 59 // 16 and usage["external_bytes"] > 0
    for name, expected in {"refreshes_total": 59 // 16, "refresh_seconds_count": 59 // 16, "external_bytes": 0}.items():
        assert strict.metric(f"vllm:kvmerge_{name}", policy="h2o") == expected


def test_what_is_allowed_is_listed(strict: Server) -> None:
    catalogue = httpx.get(strict.url + "/kvmerge/policies", timeout=60).json()
    assert {preset["name"] for preset in catalogue["presets"]} == {"full", *ALLOWED}
    schema = httpx.get(strict.url + "/openapi.json", timeout=60).json()["components"]["schemas"]
    field = schema["CompletionRequest"]["properties"]["kv_compression"]
    assert set(field["anyOf"][0]["discriminator"]["mapping"]) == {"full", *ALLOWED}


def test_a_part_that_fails_is_named_and_counted(strict: Server) -> None:
    """``test_faults`` has other requests beside it, ``tests/engine/test_containment.py`` all faults."""
    compression = {"policy": failing.PRESET, "budget": 64, "select_fault": "raise"}
    check_refused(answer(strict, compression), None, "selector failing", 500)
    streamed = answer(strict, compression, stream=True).text
    assert "selector failing" in streamed and '"error"' in streamed
    labels = {"policy": failing.PRESET, "part": "selector:failing"}
    assert strict.metric("vllm:kvmerge_failed_compactions_total", **labels) == 2


def test_a_part_that_exceeds_its_bounds_twice_is_refused(strict: Server) -> None:
    compression = {"policy": failing.PRESET, "budget": 64, "merge_fault": "hold"}
    ended, _, refused = (answer(strict, compression) for _ in range(3))
    check_refused(ended, None, "merger failing: held 256.0 MiB, more than", 500)
    check_refused(refused, "kv_compression", "merger:failing is refused until the server is restarted")
    assert answer(strict, {"policy": "keepkv", "budget": 64}).status_code == 200


def test_a_worker_is_killed_while_it_answers(strict: Server) -> None:
    """The last test here."""
    kill(strict, "Worker")
