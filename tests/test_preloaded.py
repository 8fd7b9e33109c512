"""Processes that begin with vLLM imported are, for those who start them, like any other."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from tests import preloaded

pytestmark = pytest.mark.engine

SAYS_WHAT_IT_IS = """
import json, os, sys
print(json.dumps([os.getppid(), sys.argv, os.getcwd(), os.environ["GIVEN"], "vllm" in sys.modules, input()]))
print("on stderr", file=sys.stderr)
sys.exit(3)
"""

SPAWNS = """
import json, multiprocessing, os, sys

sys.is_marked = __name__ == "__main__"

def look(results, depth):
    process = multiprocessing.current_process()
    found = [process.name, os.getppid(), os.environ.get("GIVEN"), "vllm" in sys.modules, sys.is_marked]
    results.put([*found, found[1] == multiprocessing.parent_process().pid])
    if depth:
        spawn(results, "inner", depth - 1)
    sys.exit(depth)

def spawn(results, name, depth):
    process = multiprocessing.get_context("spawn").Process(target=look, args=(results, depth), name=name)
    process.start()
    process.join()
    results.put([process.pid, process.exitcode])

if __name__ == "__main__":
    results = multiprocessing.get_context("spawn").Queue()
    os.environ |= json.loads(sys.argv[1])
    spawn(results, "outer", 1)
    print(json.dumps([os.getpid(), *(results.get() for _ in range(4))]))
"""


def python(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return preloaded.run([sys.executable, *words], **options)


def test_it_is_given_what_another_is():
    done = python("-c", SAYS_WHAT_IT_IS, "one", "two", env=os.environ | {"GIVEN": "this"}, input="line\n")
    assert json.loads(done.stdout) == [os.getpid(), ["-c", "one", "two"], os.getcwd(), "this", True, "line"]
    assert (done.stderr, done.returncode) == ("on stderr\n", 3)


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise ValueError('wrong')", "ValueError: wrong\n"), ("import sys; sys.exit('wrong')", "wrong\n")],
)
def test_it_fails_as_another_does(code, said):
    done = python("-c", code)
    assert done.returncode == 1 and done.stderr.endswith(said)


@pytest.mark.parametrize(
    ("variables", "is_forked"), [({"GIVEN": "later"}, True), ({"VLLM_LOGGING_LEVEL": "DEBUG"}, False)]
)
def test_what_it_spawns_is_its_child_without_its_state(tmp_path, variables, is_forked):
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    done = python(str(script), json.dumps(variables))
    assert done.returncode == 0, done.stderr
    pid, outer, inner, *ends = json.loads(done.stdout)
    assert outer == ["outer", pid, variables.get("GIVEN"), is_forked, False, True]
    assert inner == ["inner", ends[1][0], variables.get("GIVEN"), is_forked, False, True]
    assert [status for _, status in ends] == [0, 1]


def test_it_finds_the_packages_of_its_own_path(tmp_path):
    """In front of what is installed. Another process does not find them."""
    (tmp_path / "planted.py").write_text("import sys\nfound = sys.path[1]\n")
    code = "import planted; print(planted.found)"
    path = os.pathsep.join([str(tmp_path), str(tmp_path), os.environ["PYTHONPATH"]])
    done = python("-c", code, env=os.environ | {"PYTHONPATH": path})
    assert (done.stdout, done.stderr) == (f"{tmp_path}\n", "")
    assert "No module named 'planted'" in python("-c", code).stderr


def test_variables_that_were_read_cannot_be_others():
    with pytest.raises(ValueError, match=r"\['VLLM_LOGGING_LEVEL'\] were read"):
        python("-c", "", env=os.environ | {"VLLM_LOGGING_LEVEL": "DEBUG"})


@pytest.mark.parametrize("has_folder", [False, True])
def test_metrics_are_kept_as_the_process_says(tmp_path, has_folder):
    name = "PROMETHEUS_MULTIPROC_DIR"
    code = "import os; " + (f"os.environ['{name}'] = {str(tmp_path)!r}; " if has_folder else "")
    code += "from prometheus_client import Counter; Counter('some', 'thing').inc()"
    done = python("-c", code, env={key: value for key, value in os.environ.items() if key != name})
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == has_folder


def test_nothing_is_left_of_it():
    code = "import time; print('ready', flush=True); time.sleep(600)"
    with preloaded.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (source,) = psutil.Process(process.pid).children()
        process.kill()
    assert process.returncode == -9
    psutil.wait_procs([source], timeout=60)
    assert not source.is_running() or source.status() == psutil.STATUS_ZOMBIE


def test_that_nothing_can_be_started_shows():
    code = "import multiprocessing, psutil; [one.kill() for one in psutil.Process().children()]; "
    code += "multiprocessing.get_context('spawn').Process().start()"
    done = python("-c", code)
    assert done.returncode == 1
    assert "RuntimeError: the process that has imported vLLM for the tests has ended" in done.stderr
