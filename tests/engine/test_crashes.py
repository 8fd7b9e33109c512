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

ABORTS = """
import os

def test_before():
    pass

def test_that_aborts():
    os.abort()

def test_after():
    pass
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
    recipe = re.search(r"-m pytest (-n \$\(JOBS\).*) \$\(ARGS\)", (ROOT / "Makefile").read_text())
    assert recipe
    options = recipe[1].replace("$(JOBS)", str(jobs)).split()
    return [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", *arguments]


def test_a_crash_is_a_failure_with_a_name(tmp_path):
    (tmp_path / "test_planted.py").write_text(ABORTS)
    done = subprocess.run(
        command(str(tmp_path)), cwd=tmp_path, capture_output=True, text=True, preexec_fn=end_with_tests
    )
    assert done.returncode == 1
    assert re.search(r"worker 'gw\d' crashed while running '\S*test_planted.py::test_that_aborts'", done.stdout)
    assert "worker restarting disabled" in done.stdout and re.search(r"\b1 failed, [12] passed", done.stdout)


def test_a_suite_that_is_killed_leaves_nothing_behind(tmp_path):
    """Neither its server, which is killed with it while its engine starts, nor what that has started."""
    path = tmp_path / "pids"
    (tmp_path / "test_planted.py").write_text(SERVES.format(path=str(path)))
    suite = subprocess.Popen(
        command(str(tmp_path / "test_planted.py"), "--rootdir", str(ROOT), jobs=1),
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
