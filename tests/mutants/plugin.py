"""What pytest does otherwise while reach is measured, and while a mutant's tests run (``-p tests.mutants.plugin``)."""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.mutants.reach import FOLDER, current

CHOSEN = "KVMERGE_MUTANT_TESTS"
"""The variable that names a file with the tests to run, or their files: a JSON list in the order in which they run.

Empty: all of the fast layer in the files named."""
LAST = "KVMERGE_MUTANT_LAST"
"""The variable that names a file for the test that has failed, or that runs: one that hangs ends the process."""

_seconds: dict[str, float] = defaultdict(float)
_failed: set[str] = set()


def name(nodeid: str) -> str:
    """A test's, without its parameters."""
    return nodeid.partition("[")[0].partition("@")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if CHOSEN in os.environ and config.option.all is None:
        config.option.all = False  # though files are named


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if folder := os.environ.get(FOLDER):
        current(folder).write_text(name(item.nodeid))
    _note_last(item.nodeid)


def _note_last(test: str) -> None:
    if path := os.environ.get(LAST):
        Path(path).write_text(test)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    if folder := os.environ.get(FOLDER):
        current(folder).write_text("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[name(report.nodeid)] += report.duration
    if report.failed:
        _failed.add(name(report.nodeid))
        _note_last(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = os.environ.get(FOLDER)
    if folder and "PYTEST_XDIST_WORKER" not in os.environ:
        passed = {test: seconds for test, seconds in _seconds.items() if test not in _failed}
        Path(folder, "seconds.json").write_text(json.dumps(passed))


def place(nodeid: str, order: dict[str, int]) -> int | None:
    """Of a test in an order that names it, it without its parameters, or its file."""
    names = nodeid, name(nodeid), nodeid.partition("::")[0]
    return next((order[one] for one in names if one in order), None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get(CHOSEN):
        return
    order = {test: place for place, test in enumerate(json.loads(Path(os.environ[CHOSEN]).read_text()))}
    places = {item: place(item.nodeid, order) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if places[item] is None])
    items[:] = sorted((item for item in items if places[item] is not None), key=lambda item: places[item] or 0)
