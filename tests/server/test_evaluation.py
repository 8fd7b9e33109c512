"""``vllm-kvmerge eval`` against the real server, and against one that is not ours."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.runs import assert_measured, write_config
from vllm_kvmerge import demo
from vllm_kvmerge.cli import main

CELLS, SAMPLES = 2, 6
ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> str:
    tasks = [{"task": "demo_recall", "length": 128, "facts": 4}]
    return str(
        write_config(tmp_path / "c.yaml", policies=["full", "snapkv"], budgets=[64], samples=SAMPLES, tasks=tasks)
    )


def test_the_real_server(server, config: str, tmp_path: Path) -> None:
    before = server.metric("vllm:kvmerge_requests_total", policy="snapkv")
    out = tmp_path / "out"
    assert main(["eval", config, "--endpoint", f"{server.url}/v1", "--output", str(out)]) == 0
    assert server.metric("vllm:kvmerge_requests_total", policy="snapkv") == before + SAMPLES
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert len(results) == CELLS * SAMPLES
    for result in results:
        assert_measured(result, *((128, 4) if result["policy"] == "full" else (64, 2)))
    assert sum(result["score"] for result in results if result["policy"] == "full") >= SAMPLES - 1
    assert server.url in (out / "report.html").read_text()


def test_answers_are_drawn_as_the_configuration_says(server, tmp_path: Path) -> None:
    def answers(name: str, **changes: Any) -> list[str]:
        tasks = [{"task": "demo_recall", "length": 64, "facts": 2}]
        config = write_config(tmp_path / "c.yaml", policies=["full"], samples=3, tasks=tasks, **changes)
        out = tmp_path / name
        assert main(["eval", str(config), "--endpoint", server.url, "--output", str(out)]) == 0
        return [json.loads(line)["prediction"] for line in sorted((out / "results.jsonl").read_text().splitlines())]

    drawn = {"temperature": 2.0}
    assert answers("drawn", sampling=drawn) == answers("again", sampling=drawn)
    assert answers("greedy") not in (answers("drawn", sampling=drawn), [""] * 3)
    assert answers("one token", sampling=drawn | {"top_k": 1}) == answers("greedy")


def test_agreement_without_references(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    example = ["eval", "configs/eval/agreement-demo.yaml", "--endpoint", server.url, "--samples", "2"]
    assert main([*example, "--output", str(out)]) == 0
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert len(results) == 2 * 7 and "agreement, higher is better" in (out / "summary.md").read_text()
    for result in results:
        if result["budget"] in (None, 1.0):
            assert result["score"] == 1.0 and abs(result["log_prob_change"] or 0.0) < 1e-3
        elif result["policy"] == "streaming_llm":
            assert result["score"] < 1.0 and result["log_prob_change"] > 0.1


def test_what_the_server_cannot_do(server, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*options: str) -> str:
        capsys.readouterr()
        assert main(["eval", config, "--endpoint", server.url, "--output", str(tmp_path / "out"), *options]) == 2
        return capsys.readouterr().err

    assert "model: the server has no 'other'; allowed: demo" in said("--model", "other")
    write_config(Path(config), tasks=[{"task": "demo_recall", "length": 4093}])
    assert "the longest sample takes 4098 tokens, the server 4096" in said()


class Failing(BaseHTTPRequestHandler):
    """A server that fails when it is asked for compression, and reports no usage.

    policies_status: of its list of policies. most: requests after which it closes all connections.
    """

    policies_status, most, keys = 200, 1000, list[str | None]()

    def answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:  # noqa: N802
        self.keys.append(self.headers.get("Authorization"))
        found = {"/v1/models": 200, "/kvmerge/policies": self.policies_status}
        self.answer(found.get(self.path, 404), {"data": [{"id": "other"}]})

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.keys.append(self.headers.get("Authorization"))
        if len(self.keys) > self.most:
            self.connection.close()
        elif body["kv_compression"]["policy"] == "full":
            self.answer(200, {"choices": [{"text": "1 2 3 4"}]})
        else:
            self.answer(500, {"error": {"message": "overheated"}})

    def log_message(self, *_) -> None:
        pass


@pytest.mark.parametrize(
    ("of_server", "status", "said"),
    [
        ({"policies_status": 404}, 2, ["does not run vllm-kvmerge: it would ignore kv_compression"]),
        (
            {},
            1,
            ["snapkv | 64, sample 5: HTTP 500: overheated", "snapkv | 64: 0 of 6 samples, 6 failed"],
        ),
        ({"most": 5}, 1, ["cannot be reached", "| full: 1 of 6 samples", "| snapkv | 64: 0 of 6 samples"]),
    ],
    ids=["stock", "failing", "leaving"],
)
def test_another_server(config, tmp_path, capsys, monkeypatch, of_server, status, said) -> None:
    monkeypatch.setenv("KEY_OF_MINE", "secret")
    handler: Any = type("Handler", (Failing,), of_server | {"keys": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--endpoint", f"http://127.0.0.1:{server.server_port}", "--tokenizer", demo.model_path()]
        options += ["--api-key-env", "KEY_OF_MINE", "--concurrency", "1", "--output", str(tmp_path / "out")]
        assert main(["eval", config, *options]) == status
        server.shutdown()
    printed = capsys.readouterr().err
    assert all(one in printed for one in said), printed
    assert set(handler.keys) == {"Bearer secret"}
    for path in (tmp_path / "out").rglob("*.*"):
        assert path.is_dir() or "secret" not in path.read_text()
