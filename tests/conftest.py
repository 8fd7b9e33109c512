"""Which build of the native operators is tested."""

from pathlib import Path

from vllm_kvmerge.kernels import native


def pytest_addoption(parser):
    parser.addoption("--native-library", type=Path, help="test this build of the native operators")


def pytest_configure(config):
    library = config.getoption("--native-library", default=None)
    if library is not None:
        native.LIBRARY = library.resolve()
        native.library()  # a build that cannot be loaded must not pass as one that is not there
