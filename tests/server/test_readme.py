"""The README's commands, as they stand, against the real server."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import end_with_tests

pytestmark = pytest.mark.engine

ONLY_AFTER_TROUBLE = {"vllm:kvmerge_overflows_total", "vllm:kvmerge_failed_compactions_total"}
"""Metrics without a sample as long as nothing has gone wrong."""

README = (Path(__file__).parents[2] / "README.md").read_text()
BASH = re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S)
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)


def run(command: list[str], **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, preexec_fn=end_with_tests, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def outputs(server) -> list[str]:
    """What each curl printed; the first block only draws the prompt that they share."""
    here = [
        block.replace("http://127.0.0.1:8000", server.url).replace(".venv/bin/python", sys.executable) for block in BASH
    ]
    mark = "\n=====\n"
    script = f"set -e -o pipefail\n{here[0]}" + "".join(f"printf '{mark}'\n{block}" for block in here[1:])
    return run(["bash", "-c", script]).split(mark)[1:]


def test_completions_with_and_without_a_policy(outputs):
    for text in outputs[:2]:
        usage = json.loads(text)["usage"]
        assert usage["prompt_tokens"] == 1000
        assert 1 <= usage["completion_tokens"] <= 5


def test_chat_streams(outputs):
    lines = [line for line in outputs[2].splitlines() if line]
    assert len(lines) > 2
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_a_mistake_is_named(outputs):
    error = json.loads(outputs[3])["error"]
    assert error["param"] == "kv_compression.budget"
    assert error["code"] == 400


def test_metrics_are_all_there(outputs):
    rows = re.findall(r"^\| (`vllm:kvmerge.*?) \|", README, re.M)
    named = {name for row in rows for name in re.findall(r"`(.*?)`", row)}
    assert len(named) == 15
    printed = {line.split("{")[0].split(" ")[0] for line in outputs[4].splitlines() if not line.startswith("#")}
    for name in named - ONLY_AFTER_TROUBLE:
        assert name in printed or f"{name}_count" in printed, name


def test_a_part_is_replaced(outputs):
    usage = json.loads(outputs[5])["usage"]
    assert usage["prompt_tokens"] == 1000
    assert 1 <= usage["completion_tokens"] <= 5


def test_a_document_before_its_question(outputs):
    usage = json.loads(outputs[6])["usage"]
    assert usage["prompt_tokens"] == 1000
    assert 1 <= usage["completion_tokens"] <= 5


def test_the_official_client(server):
    client, _ = PYTHON
    assert run([sys.executable, "-c", client.replace("http://127.0.0.1:8000", server.url)]).strip()


def test_offline(tmp_path):
    script = tmp_path / "offline.py"
    script.write_text(PYTHON[1])
    assert run([sys.executable, str(script)]).strip()


def test_every_policy_is_in_the_table():
    from vllm_kvmerge.policies import PRESETS

    first_cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", README, re.M)
    assert {name for cell in first_cells for name in re.findall(r"\w+", cell)} == {"full", *PRESETS}
