"""Processes whose parent is killed: those of vLLM's making end, a user's own do not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests import preloaded
from tests.documented import ROOT, blocks
from tests.processes import end_with_tests
from vllm_kvmerge.engine.processes import METRICS_DIR, METRICS_PREFIX

pytestmark = pytest.mark.engine

PARENT = """
import json, multiprocessing, os, sys, time
from vllm_kvmerge.engine.processes import end_with_parent

def live(ready):
    end_with_parent()
    ready.set()
    time.sleep(600)

if __name__ == "__main__":
    method, names = sys.argv[1], sys.argv[2:]
    context = multiprocessing.get_context(method)
    pids = []
    for name in names:
        ready = context.Event()
        process = context.Process(target=live, args=(ready,), name=name)
        process.start()
        ready.wait()
        pids.append(process.pid)
    print(json.dumps(pids), flush=True)
    time.sleep(600)
"""

(OFFLINE, _) = blocks(ROOT / "docs/quickstart.md", "python")
THEN_WAIT = """
    import json, psutil, time
    print("PIDS" + json.dumps([one.pid for one in psutil.Process().children(recursive=True)]), flush=True)
    time.sleep(600)
"""


@contextmanager
def killed(
    tmp_path: Path, code: str, *arguments: str, printed: list[str] | None = None, **variables: str
) -> Iterator[list[psutil.Process]]:
    """The processes of which a program has printed the ids, after it has been killed; printed: what it has before."""
    script = tmp_path / "program.py"
    script.write_text(code)
    environment = os.environ | variables
    command = [sys.executable, str(script), *arguments]
    # The quickstart's starts an engine; of the others the start is what is tested.
    start = preloaded.Popen if printed is not None else subprocess.Popen
    with start(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=end_with_tests) as program:
        assert program.stdout is not None
        lines = [] if printed is None else printed
        for line in program.stdout:
            if line.startswith(("PIDS", "[")):
                break
            lines.append(line)
        else:
            raise AssertionError("it ended by itself")
        processes = [psutil.Process(pid) for pid in json.loads(line.removeprefix("PIDS"))]
        try:
            program.kill()
            yield processes
        finally:
            for process in processes:
                if process.is_running():
                    process.kill()


def still_there(processes: list[psutil.Process], timeout: float) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.thin(3)
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_end_with_their_parent(tmp_path, method):
    """Two of them: what is forked later holds what an earlier one watches. A process of the user's own goes on."""
    with killed(tmp_path, PARENT, method, "Process-1", "EngineCore_DP0", "VllmWorker-1") as (own, *children):
        assert still_there(children, 60) == []
        assert still_there([own], 3) == [own]


@pytest.mark.slow
def test_a_process_that_an_engine_core_forks_ends_with_it(tmp_path):
    """What it was forked from has been watching before it."""
    code = PARENT.replace(
        "    ready.set()",
        "    if multiprocessing.current_process().name == 'EngineCore':\n"
        "        forking = multiprocessing.get_context('fork')\n"
        "        begun = forking.Event()\n"
        "        worker = forking.Process(target=live, args=(begun,), name='VllmWorker-0')\n"
        "        worker.start()\n"
        "        begun.wait()\n"
        "        print('PIDS' + json.dumps([os.getpid(), worker.pid]), flush=True)\n"
        "    ready.set()",
    )
    with killed(tmp_path, code, "spawn", "EngineCore") as children:
        assert len(children) == 2
        assert still_there(children, 60) == []


def test_a_killed_parents_metrics_folder_is_removed(tmp_path):
    """By the child that it has started, and not by others."""
    code = PARENT.replace(
        "    context =",
        "    from vllm_kvmerge.engine import processes\n"
        f"    os.environ['{METRICS_DIR}'] = processes.make_metrics_folder()\n"
        "    context =",
    )
    other = tmp_path / f"{METRICS_PREFIX}1-other"
    other.mkdir()
    with killed(tmp_path, code, "spawn", "EngineCore", TMPDIR=str(tmp_path)) as children:
        assert still_there(children, 60) == []
    assert list(tmp_path.glob(f"{METRICS_PREFIX}*")) == [other]


def test_an_engine_ends_with_the_program_that_made_it(tmp_path):
    """The quickstart's offline program, killed when it has printed its answer."""
    printed: list[str] = []
    code = OFFLINE + THEN_WAIT
    with killed(tmp_path, code, printed=printed, VLLM_ENABLE_V1_MULTIPROCESSING="1") as children:
        assert printed[-1].partition("expected:")[0].strip() and printed[-2].startswith("kept: {'mean': 300")
        assert len(children) >= 2
        assert still_there(children, 120) == []
