"""Which builds of operators are tested, and how many of each test's cases."""

import gc
import os
import re
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from execnet.gateway_base import ThreadExecModel
from xdist.scheduler import LoadScopeScheduling

from tests import examples, preloaded, vllm_library
from vllm_kvmerge.ops import cpu

INNER_LOOP = "not engine"
"""What is asked for with ``-m`` between two edits."""

THIN_ON_GPU = 7
"""Each case compiles kernels of its own."""

THIN_IN_INNER_LOOP = 2
"""Of the tests of all operators, one of how many cases; ``make test`` runs all."""

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser):
    parser.addoption("--native-library", type=Path, help="test this build of the native operators")
    parser.addoption("--emulated-library", type=Path, help="test this build of the operators in CUDA C++ for the CPU")
    parser.addoption(
        "--vllm-library",
        choices=vllm_library.LIBRARIES,
        help="which of vLLM's libraries of CPU operators this process and those that it starts load; default: the one "
        "that vLLM takes on this processor, without AMX",
    )
    parser.addoption("--operations", type=int, help="of the random schedules in tests/engine/test_machine.py")
    parser.addoption("--requests", type=int, help="of the stress in tests/engine/test_poison.py; default: 60")
    parser.addoption("--fuzz-cases", type=int, help="requests in tests/server/test_hostile_input.py")
    parser.addoption(
        "--thin",
        type=int,
        help="run every THIN-th case of each test of all operators, for slow ones; default: all, of Triton's on a GPU "
        f"every {THIN_ON_GPU}th",
    )


def pytest_configure(config):
    if config.getoption("markexpr") == INNER_LOOP:
        examples.share = 4
    # What tests start is of this checkout, and finds the modules of tests.
    root, path = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
    if not path.startswith(root):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, path]))
    library = config.getoption("--native-library", default=None)
    if library is not None:
        cpu.LIBRARY = library.resolve()
        cpu.library()  # a build that cannot be loaded must not pass as one that is not there
    chosen = config.getoption("--vllm-library", default=None) or vllm_library.default()
    if chosen is not None:
        try:
            folder = vllm_library.choose(chosen)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        config.add_cleanup(folder.cleanup)
    preloaded.initial = dict(os.environ)


def pytest_report_header(config):
    libraries = vllm_library.runnable()
    chosen = config.getoption("--vllm-library", default=None) or next(iter(libraries), "none for this processor")
    levels = cpu.levels() if cpu.LIBRARY.exists() else ["not built"]
    return [
        f"vLLM's operators: {chosen} (this processor can run {', '.join(libraries) or 'none'})",
        f"native operators: {levels[0]} (tested: {', '.join(levels)})",
    ]


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Variables that engines and evaluations set in this process are not handed on to what later files start."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported meanwhile stays: looking for garbage in it takes a sixth of the time, and again in each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure():
    gc.unfreeze()


def pytest_ignore_collect(collection_path, config):
    """Files that the inner loop leaves out as a whole are not imported: most of them import vLLM."""
    if config.getoption("markexpr") != INNER_LOOP or not collection_path.match("test_*.py"):
        return None
    return True if re.search(r"^pytestmark = \[?pytest\.mark\.engine\b", collection_path.read_text(), re.M) else None


SHARED = ("server", "engine")
"""Session fixtures that take long to set up, in the order in which the tests that use them begin."""


@cache
def shared_fixture(path):
    """Name of the fixture of ``SHARED`` that a test file uses, and neither defines nor has of another; None: it uses
    none."""
    text = (Path(__file__).parents[1] / path).read_text()
    for name in SHARED:
        used = re.search(rf"(?:def test_\w+|@pytest\.fixture[^\n]*\ndef \w+)\([^)]*\b{name}\b", text)
        of_its_own = re.search(rf"\ndef {name}\(|\nfrom tests[\w.]* import (?:\([^)]*|[^\n(]*)\b{name}\b", text)
        if used and not of_its_own:
            return name
    return None


@cache
def starts_processes(path):
    """Whether a file's tests start servers or engines of their own. These begin first: one that began last would run
    alone for a minute or two."""
    text = (Path(__file__).parents[1] / path).read_text()
    return re.search(r"\b(serving|running|Popen|kvmerge_engine_args)\(|(subprocess|preloaded)\.run\(", text) is not None


class FilesThatShare(LoadScopeScheduling):
    """Files that use one engine or server run in one process, one after the other; any other file by itself.

    Those that wait for processes beside the engine use another: it costs less than all would wait for them.
    """

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0]
        fixture = shared_fixture(path)
        return "engine beside processes" if fixture == "engine" and starts_processes(path) else fixture or path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config):
    """Workers begin with vLLM imported if they run all tests. Of few, most need no vLLM or start nothing with it."""
    if config.args_source is config.ArgsSource.TESTPATHS and config.getoption("markexpr") != INNER_LOOP:
        ThreadExecModel.subprocess = SimpleNamespace(PIPE=subprocess.PIPE, Popen=preloaded.Popen)


def pytest_xdist_make_scheduler(config, log):
    return FilesThatShare(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if set(SHARED) & set(item.fixturenames):
            item.add_marker(pytest.mark.engine)
    items.sort(
        key=lambda item: (
            (*SHARED, None).index(shared_fixture(item.location[0])),
            shared_fixture(item.location[0]) is None and not starts_processes(item.location[0]),
            item.get_closest_marker("last") is not None,
        )
    )
    result = yield
    # After -k has chosen: what is counted is the cases that would run.
    _thin(config, items)
    return result


def _thin(config, items):
    thin, seen = config.getoption("--thin", default=None), defaultdict(int)
    others = THIN_IN_INNER_LOOP if config.getoption("markexpr") == INNER_LOOP else 1
    kept, dropped = [], []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        on_gpu = next((p for p in (params.get("operators"), params.get("strict")) if str(p).endswith("gpu")), None)
        step = 1
        if "operators" in item.fixturenames or on_gpu:
            step = thin or (THIN_ON_GPU if on_gpu in ("triton-gpu", "reference-gpu") else others)
        group = item.nodeid.partition("[")[0], on_gpu
        (dropped if seen[group] % step else kept).append(item)
        seen[group] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
