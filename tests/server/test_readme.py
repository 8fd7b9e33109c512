"""The commands of README and quickstart, as they stand, against the real server.

``tests/engine/test_processes.py`` runs the quickstart's offline program.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documented import ROOT, blocks
from tests.processes import end_with_tests
from tests.server.conftest import Server, free_port, logged, wait_until
from tests.vllm_library import HAS_AVX512
from vllm_kvmerge.cli import main
from vllm_kvmerge.demo import handbook, pretrained
from vllm_kvmerge.evaluation.config import read_config
from vllm_kvmerge.evaluation.runner import cells_of

pytestmark = pytest.mark.engine

LATER = "overflows", "not_offloaded_requests", "refreshes", "context_hits", "context_hit_tokens", "context_misses"
VERIFIED = "verified_tokens", "agreeing_tokens", "verification_tokens", "not_verified_answers", "fallback_answers"
NOT_YET = {f"vllm:kvmerge_{what}_total" for what in (*LATER, *VERIFIED, "saved_contexts", "repeating_answers")}
NOT_YET |= {"vllm:kvmerge_refresh_seconds", "vllm:kvmerge_log_prob_drop"}
"""Metrics without a sample before something overflows, is refreshed (``test_limits``), found or saved
(``test_contexts``) or verified (``test_verification``), or an answer repeats itself."""

README = ROOT / "README.md"
QUICKSTART = ROOT / "docs/quickstart.md"


def run(command: list[str], **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, preexec_fn=end_with_tests, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_here(server, scripts: list[str]) -> list[str]:
    """What each script prints; they are run by one shell, so that later ones see the variables of earlier ones."""
    mark = "\n=====\n"
    script = "set -e -o pipefail\n" + f"printf '{mark}'\n".join(scripts)
    script = script.replace("http://127.0.0.1:8000", server.url).replace(".venv/bin/python", sys.executable)
    return run(["bash", "-c", script]).split(mark)


@pytest.fixture(scope="module")
def outputs(server) -> list[str]:
    """What each curl of the quickstart printed; the first block only draws the prompt that they share: here the same in
    each run, because the answers to some prompts differ with a policy."""
    draw, *others = blocks(QUICKSTART, "bash")
    return run_here(server, [draw.replace("--facts 16", "--facts 16 --seed 7"), *others])[1:]


@pytest.fixture(scope="module")
def readme_server() -> Iterator[Server]:
    """What ``make serve`` runs, in the environment of these tests, which counts as set up."""
    environment, port = Path(sys.executable).parents[1], free_port()
    words = "-o", f"{environment}/.vllm-kvmerge-setup", "serve", f"VENV={environment}", f"PORT={port}", "ARGS="
    pretrained.folder("smollm2")  # or the demo model would be served, and the request refused
    recipe = run(["make", "--no-print-directory", "--dry-run", *words], cwd=ROOT, env=os.environ | {"MAKEFLAGS": ""})
    assert "pip install" not in recipe
    script = recipe.replace("VLLM_CPU_KVCACHE_SPACE=", "exec env VLLM_CPU_KVCACHE_SPACE=", 1)
    with logged(["bash", "-c", script]) as (process, log, reader):
        wait_until(lambda: process.poll() is not None or any("ready on" in line for line in log), 400)
        assert process.poll() is None, "".join(log[-40:])
        yield Server(f"http://127.0.0.1:{port}", process, log, reader)


def test_the_request_of_the_readme(readme_server):
    """The answer is the one that the README shows, to the byte; without AVX-512, where the cache is float32, but for
    its bytes and how heads share entries."""
    assert any("takes a minute or two" in line for line in readme_server.log)
    (answer,) = map(json.loads, run_here(readme_server, blocks(README, "bash")))
    (shown,) = map(json.loads, blocks(README, "json"))
    ((said,), (found,)) = shown["choices"], answer["choices"]
    assert said["message"].items() <= found["message"].items() and said["finish_reason"] == found["finish_reason"]
    told, held = shown["usage"].pop("kv_compression"), answer["usage"].pop("kv_compression")
    assert shown["usage"].items() <= answer["usage"].items()
    if not HAS_AVX512:
        assert told.pop("bytes")["end"] < held["bytes"]["end"]
        assert told.pop("entries")["mean"] == held["entries"]["mean"]
    assert told.items() <= held.items()


def test_the_readmes_document_is_the_handbook():
    request = json.loads((ROOT / "configs/request.json").read_text())
    document, question = (message["content"] for message in request["messages"])
    assert document == handbook.document() and question in dict(json.loads(handbook.QUESTIONS.read_text()))


def test_completions_with_and_without_a_policy(outputs):
    """Also with a part replaced, and of a document before its question."""
    answers = [json.loads(outputs[index]) for index in (0, 1, 5, 6)]
    for answer in answers:
        assert answer["usage"]["prompt_tokens"] == 1000 and 1 <= answer["usage"]["completion_tokens"] <= 5
    plain, compressed, *_ = answers
    assert plain["choices"][0]["text"].split() == compressed["choices"][0]["text"].split()
    assert compressed["usage"]["kv_compression"]["entries"]["most"] == 300


def test_chat_streams(outputs):
    lines = list(filter(None, outputs[2].splitlines()))
    assert len(lines) > 2 and all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"


def test_a_mistake_is_named(outputs):
    error = json.loads(outputs[3])["error"]
    assert (error["param"], error["code"]) == ("kv_compression.budget", 400)
    documented = next(text for text in blocks(ROOT / "docs/request-field.md", "json") if "error" in text)
    assert json.loads(documented)["error"] == error


def test_metrics_are_all_there(outputs):
    named = set(re.findall(r"`(vllm:kvmerge\w+)`", (ROOT / "docs/reference.md").read_text()))
    assert len(named) == 36
    printed = {line.split("{")[0].split(" ")[0] for line in outputs[4].splitlines() if not line.startswith("#")}
    for name in named - NOT_YET:
        assert name in printed or f"{name}_count" in printed, name


def test_the_command_that_the_server_prints(server):
    start = next(index for index, line in enumerate(server.log) if line.startswith("PROMPT="))
    printed = run(["bash", "-c", "".join(server.log[start : start + 3])])
    assert json.loads(printed)["usage"]["kv_compression"]["entries"]["mean"] == 250


@pytest.mark.slow
def test_an_evaluation_of_a_server(server, tmp_path, monkeypatch):
    """The documented command, for one sample of each task, and few at a time: a compression has a limit of seconds."""
    (script,) = (text for text in blocks(ROOT / "docs/evaluation.md", "sh") if "--endpoint" in text)
    words = shlex.split(script.replace("http://127.0.0.1:8000", server.url))[1:]
    monkeypatch.chdir(ROOT)
    assert main([*words, "--samples", "1", "--concurrency", "2", "--output", str(tmp_path / "out")]) == 0
    config = read_config(Path(words[1]), {})
    assert len((tmp_path / "out/results.jsonl").read_text().splitlines()) == len(cells_of(config))


@pytest.mark.slow
def test_the_commands_of_the_section_on_contexts(server):
    """A fact in the context that is kept is known to the request that names it."""
    _, asked, called = run_here(server, blocks(ROOT / "docs/request-field.md", "bash"))
    assert json.loads(asked)["choices"][0]["text"].split() == list("4821")
    listed, shown, deleted = map(json.loads, called.splitlines())
    assert listed["data"] == [shown] and deleted == {"id": shown["id"], "object": "kv_context", "deleted": True}
