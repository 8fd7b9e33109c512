"""Which build of the native operators is tested, and how many of each test's cases."""

from collections import defaultdict
from pathlib import Path

import pytest

from vllm_kvmerge.kernels import native


def pytest_addoption(parser):
    parser.addoption("--native-library", type=Path, help="test this build of the native operators")
    parser.addoption(
        "--thin", type=int, default=1, help="run every THIN-th case of each test of all operators, for slow ones"
    )


def pytest_configure(config):
    library = config.getoption("--native-library", default=None)
    if library is not None:
        native.LIBRARY = library.resolve()
        native.library()  # a build that cannot be loaded must not pass as one that is not there


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    thin, seen = config.getoption("--thin", default=1), defaultdict(int)
    if thin == 1:
        return
    # After -k has chosen: what is counted is the cases that would run.
    kept, dropped = [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (dropped if "operators" in item.fixturenames and seen[name] % thin else kept).append(item)
        seen[name] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
