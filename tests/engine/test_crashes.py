"""The suite itself: a process that crashes is a failure with a name; a suite that is killed leaves nothing behind."""

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import end_with_tests

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]

FAULTS = {"crash": "os.abort()", "hang": "time.sleep(600)"}

FAULTY = """
import os, time

def test_before():
    pass

def test_that_ends_it():
    {fault}
"""

OTHER = """
import time
import pytest

@pytest.mark.timeout(600)
def test_of_another_process():
    time.sleep(600)
"""

SERVES = """
import time
import psutil
from tests.server.conftest import free_port, running

def test_with_a_server():
    with running("--port", str(free_port()), from_scratch=True) as (process, *_):
        server = psutil.Process(process.pid)
        while len(server.children()) < 2:  # its engine is starting
            time.sleep(0.1)
        processes = [server, *server.children(recursive=True)]
        open({path!r}, "w").write(" ".join(str(one.pid) for one in processes) + "\\n")
        time.sleep(600)
"""


def command(*arguments: str, jobs: int = 2) -> list[str]:
    """pytest as ``make test`` calls it."""
    recipe = re.search(r"^PARALLEL := (-n \$\(JOBS\).*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    options = recipe[1].replace("$(JOBS)", str(jobs)).split()
    return [
        sys.executable,
        "-m",
        "pytest",
        *options,
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        *arguments,
    ]


@pytest.mark.thin(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_process_that_ends_fails_the_run_at_once_and_names_the_test(tmp_path, fault):
    """While another one has minutes to go."""
    (tmp_path / "test_faulty.py").write_text(FAULTY.format(fault=FAULTS[fault]))
    (tmp_path / "test_other.py").write_text(OTHER)
    limit = () if fault == "crash" else ("--timeout", "5")
    files = str(tmp_path / "test_faulty.py"), str(tmp_path / "test_other.py")
    done = subprocess.run(
        command("-p", "tests.conftest", "-m", "not engine", *limit, *files),
        cwd=ROOT, capture_output=True, text=True, preexec_fn=end_with_tests, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert re.search(r"process that ran \S*::test_that_ends_it\S* has crashed or hung", done.stdout)


@pytest.mark.slow
def test_a_suite_that_is_killed_leaves_nothing_behind(tmp_path):
    """Neither its server, which is killed with it while its engine starts, nor what that has started."""
    path = tmp_path / "pids"
    (tmp_path / "test_planted.py").write_text(SERVES.format(path=str(path)))
    suite = subprocess.Popen(
        command(str(tmp_path / "test_planted.py"), jobs=1),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=end_with_tests,
    )
    while not (path.exists() and path.read_text().endswith("\n")):
        assert suite.poll() is None
        time.sleep(0.1)
    processes = [psutil.Process(int(pid)) for pid in path.read_text().split()]
    suite.kill()
    suite.wait()
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
