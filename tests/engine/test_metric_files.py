"""Metric files that do not fit, in folders that are gone, and damaged; each case counts in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.parser import text_string_to_metric_families

from vllm_kvmerge.engine.metric_files import MetricFile

ERRORS = "vllm:kvmerge_metrics_write_errors"

CUT_OFF = b"\x00\x80\x00\x00" + bytes(100)
"""It ends before its values do."""

PREAMBLE = """
import os, resource, shutil, sys
from pathlib import Path
folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
from vllm_kvmerge.engine import compat, metrics
compat.keep_metric_files()
from vllm_kvmerge.engine import metric_files as files
from prometheus_client import CollectorRegistry, Counter, generate_latest, multiprocess

def show():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())

many = Counter("many", "Values that fill files.", ["number"])
def fill(count=3000):
    for number in range(count):
        many.labels(f"{number:0100}").inc(number)
"""


def count(folder: Path, code: str) -> tuple[dict[tuple[str, str], float], str]:
    """Samples by name and label ``number`` or ``policy`` that a process shows at the end, and what it logs."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", PREAMBLE + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    samples = {}
    for sample in (one for family in text_string_to_metric_families(done.stdout) for one in family.samples):
        label = sample.labels.get("number", sample.labels.get("policy", "")).lstrip("0")
        samples[sample.name, label] = sample.value
    return samples, done.stderr


def check_filled(samples: dict[tuple[str, str], float], total: int = 3000) -> None:
    for number in range(1, total):
        assert samples["many_total", str(number)] == number


def test_files_that_grow_hold_what_prometheus_client_would_write(tmp_path):
    samples, log = count(tmp_path, "fill(); show()")
    check_filled(samples)
    assert samples[ERRORS, ""] == 0 and log == ""
    (file,) = tmp_path.glob("counter_*.db")
    assert sum(value for _, value, *_ in MmapedDict.read_all_values_from_file(str(file))) == sum(range(3000))


def test_a_file_that_was_there_before_goes_on(tmp_path):
    """As in a container, where each process gets the id that it had in the last one."""
    name = str(tmp_path / "counter_1.db")
    for turn in range(3):
        file = MetricFile(name)
        for key, value in (('["a"]', 1.0), ('["b"]', 2.0)):
            before, _ = file.read_value(key)
            assert before == turn * value
            file.write_value(key, before + value, 0.0)
        file.close()
    written = {key: value for key, value, *_ in MetricFile.read_all_values_from_file(name)}
    assert written == {'["a"]': 3.0, '["b"]': 6.0}


def test_a_damaged_file_of_its_own_is_left_alone(tmp_path):
    path = tmp_path / "counter_1.db"
    path.write_bytes(CUT_OFF)
    file = MetricFile(str(path))
    for value in (1.0, 2.0):
        file.write_value('["a"]', value, 0.0)
        file._retry_at = 0.0
    assert file.read_value('["a"]') == (2.0, 0.0)
    assert path.read_bytes() == CUT_OFF
    file.close()


def test_no_file_is_sparse(tmp_path):
    """What is not allocated is a signal in the middle of a write when the disk is full."""
    count(tmp_path, "fill(300); metrics.count_request('h2o', 0)")
    files = list(tmp_path.glob("*.db"))
    assert len(files) >= 2
    for file in files:
        assert file.stat().st_blocks * 512 >= file.stat().st_size >= 1 << 16


def test_values_that_do_not_fit_are_kept(tmp_path):
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
    samples, log = count(tmp_path, limit + "fill(); show()")
    check_filled(samples)
    assert 2000 < samples[ERRORS, ""] < 3000
    assert log.count("cannot be written") == 1
    others, _ = count(tmp_path, "show()")
    # Another process sees those that were written, and how many were not.
    assert others[ERRORS, ""] == samples[ERRORS, ""]
    assert sum(name == "many_total" for name, _ in others) == 3000 - samples[ERRORS, ""]


def test_values_are_written_when_there_is_room_again(tmp_path):
    code = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))\nfill()\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
    code += "for file in files.MetricFile.opened.values(): file._retry_at = 0\nmany.labels('9').inc(9); show()"
    samples, _ = count(tmp_path, code)
    check_filled(samples)
    assert samples[ERRORS, ""] == 0
    others, _ = count(tmp_path, "show()")
    check_filled(others)


FAULTS = {
    "gone": "shutil.rmtree(folder)",
    "no folder": "shutil.rmtree(folder); folder.write_text('a file')",
    "no descriptors": "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 4096))",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_written(tmp_path, fault):
    code = f"{FAULTS[fault]}\nmetrics.count_request('h2o', 0)\nfill(5)\n"
    code += "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096)); show()"
    samples, log = count(tmp_path / "metrics", code)
    assert samples["vllm:kvmerge_requests_total", "h2o"] == 1
    check_filled(samples, 5)
    assert samples[ERRORS, ""] >= 6
    assert log.count("metrics: ") == 1


def test_damaged_files_are_passed_over(tmp_path):
    """Empty; noise; one that is cut off; one whose keys are lost."""
    for index, damage in enumerate([b"", b"\x7f" * 100, CUT_OFF, b"\x40\x00\x00\x00" + bytes(1000)]):
        (tmp_path / f"counter_{index}.db").write_bytes(damage)
    samples, log = count(tmp_path, "metrics.count_request('h2o', 0); show()")
    assert samples["vllm:kvmerge_requests_total", "h2o"] == 1
    assert log.count("cannot be read") == 1
