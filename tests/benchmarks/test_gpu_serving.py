"""The benchmark of serving on a GPU: on the CPU it runs tiny shapes, and without a GPU it says so."""

import json
import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.processes import end_with_tests

pytestmark = pytest.mark.engine

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPT = FOLDER / "gpu_serving.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import gpu_serving

    return gpu_serving


def row(benchmark, case, length, **medians):
    from report import Spread

    names = ("decode", "intertoken", "total")
    fields = dict.fromkeys([*names, *(f"{name}_ratio" for name in (*names, "first_token"))], 1.0) | medians
    spreads = {name: Spread(median, median, median) for name, median in fields.items()}
    counts = {"generated": 8, "requests": 1, "turns": 1, "preemptions": 0, "intertoken_p99": 1.0, "peak_usage": 0.5}
    return benchmark.Row(case=case, length=length, **counts, **spreads)


def test_aims_are_reached_missed_or_not_measured(benchmark):
    rows = [
        row(benchmark, benchmark.STOCK, 64),
        row(benchmark, "keepkv 0.1", 64, intertoken_ratio=0.4, first_token_ratio=1.06),
        row(benchmark, "snapkv 0.1", 64, intertoken_ratio=0.6, first_token_ratio=1.0),
        row(benchmark, "snapkv 0.2", 64, intertoken_ratio=0.1),
        row(benchmark, "keepkv 0.1", 32, intertoken_ratio=0.1),
    ]
    between, together, first = benchmark.verdicts({"latency": rows}, 64)
    assert between.endswith("full cache: keepkv 0.40, reached; snapkv 0.60, missed")
    assert together.endswith("full cache: not measured")
    assert first.endswith("full cache: keepkv 1.06, missed; snapkv 1.00, reached")
    found = {"throughput": [row(benchmark, "keepkv 0.1", 64, decode_ratio=4.5)]}
    assert benchmark.verdicts(found, 64)[1].endswith("keepkv 4.50, reached")


def test_a_part_that_fails_stops_no_other(benchmark, monkeypatch, tmp_path, capsys):
    def fails(bench):
        yield [row(benchmark, benchmark.STOCK, 64)]
        raise RuntimeError("an engine ended")

    def ends(bench):
        yield [row(benchmark, benchmark.STOCK, 64)]
        raise benchmark.OutOfTimeError

    def works(bench):
        for turns in (1, 2):
            yield [replace(row(benchmark, benchmark.STOCK, length), turns=turns) for length in (64, 128)]

    parts = {"fails": fails, "works": works, "ends": ends, "late": works}
    monkeypatch.setattr(benchmark, "PARTS", parts)
    output = tmp_path / "gpu.json"
    command = ["gpu_serving.py", "--device", "cpu", "--minutes", "9", "--output", str(output), "--parts", *parts]
    monkeypatch.setattr(sys, "argv", command)
    assert benchmark.main() == 1
    found = json.loads(output.read_text())
    counts = {part: len(content["rows"]) for part, content in found.items()}
    assert counts == {"fails": 1, "works": 2, "ends": 1}
    assert [one["turns"] for one in found["works"]["rows"]] == [2, 2]
    told = capsys.readouterr()
    assert "an engine ended" in told.err and told.err.endswith("failed: fails\n")
    assert "ends: 9 minutes are over" in told.out and "1.05 x full cache: not measured" in told.out


SIDE = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
from sides import Run, answers, serve

def run(prompts, max_tokens, compression, cold):
    assert compression != {{"policy": "fails"}}, "of this case"
    return Run([[0.1 * (number + 1) for number in range(max_tokens)] for _ in prompts], 0.5)

serve(run, answers())
"""


@pytest.mark.parametrize("has_stock", [True, False])
def test_a_case_or_side_that_fails_stops_no_other(benchmark, has_stock, tmp_path):
    from sides import Side
    from turns import Case

    (tmp_path / "side.py").write_text(SIDE)
    (tmp_path / "broken.py").write_text("")
    bench = benchmark.Bench(benchmark.parse(["--repeats", "2"]), scale=1, until=math.inf)
    with (
        Side("stock", tmp_path / ("side.py" if has_stock else "broken.py"), {}) as stock,
        Side("plugin", tmp_path / "side.py", {}) as ours,
    ):
        policies = [Case(name, ours, {"policy": name}) for name in ("fails", "works")]
        jobs = [benchmark.Job(case, 2) for case in (Case(benchmark.STOCK, stock), *policies)]
        *_, rows = bench.measure(jobs, 64, 20, cached=True, with_first_token=True)
    assert "of this case" in bench.failed.pop("fails, 64 tokens")
    assert [row.case for row in rows] == [benchmark.STOCK] * has_stock + ["works"] and rows[-1].turns == 2
    assert (rows[-1].decode_ratio is not None) == (rows[-1].first_token_ratio is not None) == has_stock
    assert list(bench.failed) == [f"{benchmark.STOCK}, 64 tokens"] * (not has_stock)


@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    [(150, {65_536: 4, 16_384: 16}), (85, {65_536: 1, 16_384: 4}), (65, {16_384: 4}), (40, None)],
)
def test_sizes_follow_the_gpu(benchmark, gigabytes, expected, monkeypatch):
    found = {}

    def measured(bench, jobs, length, *_, **__):
        found[length] = jobs[0].requests
        return iter(())

    monkeypatch.setattr(benchmark.Bench, "measure", measured)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # what is set is undone afterwards
    monkeypatch.setattr(benchmark, "vllm_side", lambda *_, **__: nullcontext())
    arguments = benchmark.parse(["--lengths", "65536", "16384"])
    bench = benchmark.Bench(arguments, scale=1, until=math.inf, memory=gigabytes * 10**9)
    if expected is None:
        with pytest.raises(RuntimeError, match="too large for this GPU"):
            list(benchmark.latency(bench))
    else:
        list(benchmark.latency(bench))
        assert found == expected


def test_a_side_ends_with_a_benchmark_that_is_killed(tmp_path):
    """Also one that is stopped, and processes that it has started."""
    script = tmp_path / "side.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(600)\n"
    )
    code = "import sys, time; sys.path.insert(0, sys.argv[1]); from sides import Side\n"
    code += "side = Side('ours', sys.argv[2], {})\nprint(side._process.pid, side._receive(), flush=True)\n"
    code += "side._is_ready = True; side._signal(19); time.sleep(600)"
    command = [sys.executable, "-c", code, str(SCRIPT.parent), str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_tests) as benchmark:
        assert benchmark.stdout is not None
        sides = [psutil.Process(int(pid)) for pid in benchmark.stdout.readline().split()]
        benchmark.kill()
    _, alive = psutil.wait_procs(sides, timeout=60)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.benchmarks
def test_a_part_runs_and_is_saved_beside_others(tmp_path):
    output = tmp_path / "gpu.json"
    output.write_text(json.dumps({"throughput": "of another run", "latency": "to be replaced"}))
    sizes = ["--lengths", "8192", "--together", "16384", "--tokens", "40", "--repeats", "1", "--budgets", "0.1"]
    command = [sys.executable, SCRIPT, "--device", "cpu", "--parts", "latency", "--policies", "keepkv", *sizes]
    command += ["--output", output, "--logs", tmp_path / "logs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, preexec_fn=end_with_tests)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    parts = json.loads(output.read_text())
    assert parts["throughput"] == "of another run" and parts["latency"]["machine"]["cpu"]
    stock, plain, keepkv = parts["latency"]["rows"]
    assert [one["case"] for one in (stock, plain, keepkv)] == ["stock vLLM", "plain", "keepkv 0.1"]
    assert all(one["requests"] == 2 and one["first_token"]["median"] > 0 for one in (stock, plain, keepkv))
    assert stock["intertoken_ratio"]["median"] == stock["first_token_ratio"]["median"] == 1
    assert keepkv["peak_usage"] < 0.5 * plain["peak_usage"]
    assert "time between tokens at most 0.5 x full cache: not measured" in done.stdout
    assert all("max_seq_len" in (tmp_path / "logs" / f"{side}.log").read_text() for side in ("stock", "plugin"))
