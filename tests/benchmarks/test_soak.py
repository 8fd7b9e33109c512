"""The soak run: what it draws, what it makes of samples, and a short one."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.processes import end_with_tests
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.parameters import parse_compression

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

from soak import is_faulty, slope_of, totals  # noqa: E402
from traffic import CHANGES, REFUSED, Outcome, is_valid, random_fields  # noqa: E402

METRICS = """
vllm:cache_config_info{engine="0",num_gpu_blocks="81",num_gpu_blocks_override="None"} 1.0
vllm:kv_cache_usage_perc{engine="0"} %s
vllm:kvmerge_live_entries{engine="0",policy="h2o"} 0.0
vllm:kvmerge_compressions_total{engine="0",policy="h2o"} 3.0
vllm:kvmerge_compressions_total{engine="0",policy="snapkv"} 4.0
"""


def wandering(seed: int, minutes: np.ndarray) -> np.ndarray:
    """Samples that resemble their neighbours, as memory does."""
    noise = np.random.default_rng(seed).normal(0, 1, len(minutes))
    for index in range(1, len(noise)):
        noise[index] += 0.8 * noise[index - 1]
    return 700 + noise


@pytest.mark.parametrize("slope", [0, 30])
def test_the_interval_holds_the_slope(slope):
    """MiB per hour, in 30 minutes, ten seconds apart: most of the intervals do, and are narrow enough to say so."""
    minutes = np.arange(180) / 6
    found = [slope_of(minutes, wandering(seed, minutes) + slope / 60 * minutes, repeats=100) for seed in range(12)]
    assert sum(one.low <= slope <= one.high for one in found) >= 9
    assert all(one.low <= one.slope <= one.high and one.high - one.low < 20 for one in found)


def test_fields_are_of_every_kind():
    rng = np.random.default_rng(0)
    drawn = [random_fields(rng, policy, 600) for policy in sorted(PRESETS) for _ in range(15)]
    assert all(parse_compression(fields) is not None for fields in drawn)
    assert {fields["policy"] for fields in drawn} == set(PRESETS)
    for change in [*CHANGES, {"context_tokens": None}]:
        assert any(set(change) <= set(fields) for fields in drawn), change
    assert all(
        not is_valid(wrong["kv_compression"])
        for wrong, _ in REFUSED
        if "context" not in json.dumps(wrong) and "kv_compression" in wrong
    )


def test_what_is_left_and_what_fails_is_found():
    sound = [Outcome("plain", 0, 1, 200, ""), Outcome("refused", 0, 1, 400, "")]
    summary = totals(sound, METRICS % "0.0") | {"exit_status": 0}
    assert not is_faulty(summary) and summary["kvmerge_compressions_total"] == 7
    assert summary["statuses"] == {200: 1, 400: 1}
    leaked = totals(sound, METRICS % "0.025") | {"exit_status": 0}
    assert is_faulty(leaked) and leaked["leaked_blocks"] == 2
    assert is_faulty(totals([*sound, Outcome("plain", 0, 1, 500, "text")], METRICS % "0.0") | {"exit_status": 0})
    assert is_faulty(summary | {"exit_status": 1})


@pytest.mark.engine
@pytest.mark.benchmarks
def test_soak(tmp_path):
    options = ["--minutes", "0.4", "--every", "2", "--rate", "3", "--plot", tmp_path / "soak.svg"]
    command = [sys.executable, FOLDER / "soak.py", *options, "--log", tmp_path / "log", "--output", tmp_path / "s.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, preexec_fn=end_with_tests)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result = json.loads((tmp_path / "s.json").read_text())
    assert [row["process"] for row in result["rows"]] == ["API server", "resource tracker", "engine core", "worker"]
    for row in result["rows"]:
        assert row["unique"]["low"] <= row["unique"]["slope"] <= row["unique"]["high"]
        assert all(all(values) for name, values in row["samples"].items())
    summary = result["totals"]
    assert summary["leaked_blocks"] == 0 and summary["faults"] == [] and summary["kvmerge_compressions_total"] > 10
    assert sum(summary["requests"].values()) > 50 and {"200", "400"} <= set(summary["statuses"])
    assert result["latency"][0]["p50"] <= result["latency"][0]["p99"]
    assert (tmp_path / "soak.svg").read_text().count("<svg") == 1
