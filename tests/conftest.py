"""Which builds of operators are tested, and how many of each test's cases."""

import argparse
import gc
import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from execnet.gateway_base import ThreadExecModel
from prometheus_client import values

from tests import examples, preloaded, vllm_library
from vllm_kvmerge.ops import cpu

INNER_LOOP = "not engine"
"""What is asked for with ``-m`` between two edits."""

THIN_ON_GPU, THIN = 7, 4
"""Of each test of all operators, one of how many cases runs: on a GPU, which compiles for each; in the fast layer."""

INNER_CASES = 4
"""Of any test, about how many cases run in the inner loop."""

SHARE_OF_EXAMPLES = 4
"""Of a property's examples, one of how many is tried in the fast layer."""


def is_fast(config):
    """Whether the fast layer was asked for."""
    return not config.getoption("all")


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
        "--all",
        action=argparse.BooleanOptionalAction,
        help="run slow tests, all examples of properties and all cases of operators, as where paths are named; "
        "otherwise the fast layer runs",
    )
    parser.addoption(
        "--thin",
        type=int,
        help="run every THIN-th case of each test of all operators, for slow ones; default: of Triton's on a GPU every "
        f"{THIN_ON_GPU}th, of others every {THIN}th in the fast layer",
    )


def pytest_configure(config):
    if config.option.all is None:  # processes of pytest-xdist have the same arguments
        config.option.all = config.args_source is config.ArgsSource.ARGS
    if is_fast(config):
        examples.share = SHARE_OF_EXAMPLES
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
    # In a process with vLLM imported already, the first value would decide: by a folder that is one test's alone.
    values.ValueClass = values.MutexValue


def pytest_report_header(config):
    libraries = vllm_library.runnable()
    chosen = config.getoption("--vllm-library", default=None) or next(iter(libraries), "none for this processor")
    return [
        f"vLLM's operators: {chosen} (this processor can run {', '.join(libraries) or 'none'})",
        f"native operators tested: {', '.join(cpu.levels()) if cpu.LIBRARY.exists() else 'not built'}",
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
    """Files that are left out as a whole are not imported: most of them import vLLM."""
    left_out = ["slow"] * is_fast(config) + ["engine"] * (config.getoption("markexpr") == INNER_LOOP)
    if not left_out or not collection_path.match("test_*.py"):
        return None
    marked = rf"^pytestmark = .*\bpytest\.mark\.({'|'.join(left_out)})\b"
    return True if re.search(marked, collection_path.read_text(), re.MULTILINE) else None


SHARED = ("server", "engine")
"""Session fixtures that take long to set up. Files that use one run in one process, one after the other."""


def shared_fixture(item):
    """The fixture of ``SHARED`` that a test uses; None: none, or one of its own file's with that name."""
    definitions = item._fixtureinfo.name2fixturedefs
    return next((name for name in SHARED if name in definitions and definitions[name][-1].scope == "session"), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config):
    """Workers begin with vLLM imported, but those of the inner loop need none."""
    if config.getoption("markexpr") != INNER_LOOP:
        ThreadExecModel.subprocess = SimpleNamespace(PIPE=subprocess.PIPE, Popen=preloaded.Popen)


@pytest.hookimpl(optionalhook=True, trylast=True)
def pytest_handlecrashitem(crashitem, report, sched):
    """A process of pytest-xdist that crashed, or that pytest-timeout ended, ends the run at once."""
    sched.config.hook.pytest_runtest_logreport(report=report)
    pytest.exit(f"the process that ran {crashitem} has crashed or hung", returncode=1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    fixtures = {}
    for item in items:
        if name := shared_fixture(item):
            item.add_marker(pytest.mark.engine)
            fixtures[item.path] = name
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(fixtures.get(item.path, item.location[0])))
    # Those that take longest begin first: one that began last would run alone for a minute or two.
    items.sort(
        key=lambda item: (
            (*SHARED, None).index(fixtures.get(item.path)),
            item.get_closest_marker("engine") is None,
            item.get_closest_marker("last") is not None,
        )
    )
    if is_fast(config):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    result = yield
    # After -k has chosen: what is counted is the cases that would run.
    _thin(config, items)
    return result


def _thin(config, items):
    """Leaves one of some cases of each test that runs many."""
    asked, is_inner_loop = config.getoption("--thin", default=None), config.getoption("markexpr") == INNER_LOOP
    cases, kept, dropped = defaultdict(list), [], []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        on_gpu = next((p for p in (params.get("operators"), params.get("strict")) if str(p).endswith("gpu")), None)
        cases[item.nodeid.partition("[")[0], on_gpu].append(item)
    for (_, on_gpu), alike in cases.items():
        marked, step = alike[0].get_closest_marker("thin"), 1
        if marked and is_fast(config):
            (step,) = marked.args
        elif "operators" in alike[0].fixturenames or on_gpu:
            is_compiled = on_gpu in ("triton-gpu", "reference-gpu")
            step = asked or (THIN_ON_GPU if is_compiled else THIN if is_fast(config) else 1)
        if is_inner_loop:
            step = max(step, len(alike) // INNER_CASES)
        for index, item in enumerate(alike):
            (dropped if index % step else kept).append(item)
    chosen = set(kept)
    items[:] = [item for item in items if item in chosen]
    config.hook.pytest_deselected(items=dropped)
