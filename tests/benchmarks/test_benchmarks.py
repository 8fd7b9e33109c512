"""Each benchmark runs, small, and writes what it says; how fast anything is, is not tested."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import preloaded
from tests.processes import end_with_tests

pytestmark = pytest.mark.engine

FOLDER = Path(__file__).parents[2] / "benchmarks"

HELP = """
import contextlib, io, runpy, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
for script in sorted(Path(sys.argv[1]).glob("*.py")):
    if '"--output"' not in script.read_text():
        continue
    sys.argv, printed = [str(script), "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        assert not end.code and "--output" in printed.getvalue(), script
        print(script.name)
    else:
        raise AssertionError(f"{script} has no --help")
"""


def test_every_benchmark_can_be_imported_and_explains_itself():
    done = preloaded.run([sys.executable, "-c", HELP, str(FOLDER)])
    assert done.returncode == 0, done.stderr[-4000:]
    assert {"serving.py", "compaction.py", "gpu_serving.py"} <= set(done.stdout.split())


def rows(path: Path, command: str) -> list[dict]:
    """The rows of the JSON file that the benchmark writes."""
    script, *arguments = command.split()
    command = [sys.executable, str(FOLDER / script), "--output", str(path), "--repeats", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, preexec_fn=end_with_tests)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result = json.loads(path.read_text())
    assert result["machine"]["cpu"] and result["machine"]["versions"]["torch"]
    return result["rows"]


@pytest.mark.benchmarks
def test_compaction(tmp_path):
    some = rows(tmp_path / "c.json", "compaction.py --entries 256 --budget 64 --policies h2o snapkv")
    assert [row["policy"] for row in some] == ["h2o", "snapkv"]
    assert all(row["prompt_end"]["median"] > 0 for row in some)
    assert some[0]["decoding"]["median"] > 0 and some[1]["decoding"] is None  # snapkv compresses once


@pytest.mark.benchmarks
def test_serving(tmp_path):
    command = "serving.py --lengths 200 --requests 2 --tokens 40 --budget 0.2 --policies keepkv"
    some = rows(tmp_path / "s.json", command)
    assert [row["case"] for row in some] == ["stock vLLM", "plain", "empty cache", "keepkv"]
    stock, plain, empty, _ = some
    assert empty["peak_tokens"] < plain["peak_tokens"]
    assert all(row["decode_tokens_per_second"]["median"] > 0 for row in some)
    assert stock["decode_ratio"]["median"] == 1
    assert all(0 < row["first_token_ms"]["median"] < row["second_token_ms"]["median"] for row in some)
    # 2 x 240 tokens, in whole blocks.
    assert 480 <= stock["peak_tokens"] == plain["peak_tokens"]
    assert (tmp_path / "s.svg").read_text().count("<svg") == 1


@pytest.mark.benchmarks
def test_memory_pressure(tmp_path):
    some = rows(tmp_path / "m.json", "memory_pressure.py --requests 4 --length 256 --tokens 150 --policies keepkv")
    assert [row["case"] for row in some] == ["stock vLLM", "keepkv", "keepkv under pressure"]
    assert all(row["requests_per_minute"]["median"] > 0 and 0 < row["peak_usage"] <= 1 for row in some)
    # Two prompts fit, and cannot both grow by half; compressed to a fifth, they can.
    assert [row["most_preemptions"] > 0 for row in some] == [True, False, False]


@pytest.mark.benchmarks
def test_contexts(tmp_path):
    command = "contexts.py --documents 2 --questions 6 --part 3 --tokens 256 --fit 4 --sides snapkv"
    chat = "--turns 3 --turn-tokens 80 --chats 1 --chat-policies keydiff --clock processor"
    some = rows(tmp_path / "c.json", f"{command} {chat}")
    assert [row["case"] for row in some] == ["stock vLLM", "snapkv", "stock vLLM", "keydiff", "keydiff, reuse"]
    stock, snapkv, _, alone, again = some
    assert stock["ratio"]["median"] == 1 and snapkv["requests_per_minute"]["median"] > 0
    # Of six contexts two are the first of their kind, or three, where two clients ask about one at once.
    assert 0.5 <= snapkv["context_hits"]["median"] < 1 and stock["context_hits"] is None
    # All but the last question, and the last token of the answer before it; without reuse, no answer is found.
    assert again["tokens_found"]["median"] == pytest.approx((2 * 80 - 1) / (3 * 80 - 16))
    assert again["tokens_found"]["median"] > alone["tokens_found"]["median"]
