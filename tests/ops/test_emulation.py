"""The emulation of a GPU (csrc/cuda/emulated.h) finds the mistakes that it is there for."""

import os
import shlex
import shutil
import subprocess

import pytest

from tests.ops.conftest import cuda_builder

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SAID = {
    "ReadsEarly": "",
    "OverwritesEarly": "",
    "Changes": "something changes while it is copied",
    "Leaves": "a barrier that not all threads reach",
}
"""Mistakes that show in a result or are said."""
RACES = ("ReadsEarly", "OverwritesEarly", "Shuffles", "MeetsInWarps", "Collides")
"""Mistakes that are found by what orders threads, in whichever order these ran."""


def compiled(folder, *flags):
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no C++ compiler {compiler[0]!r}")
    builder, program = cuda_builder(), folder / "mistakes"
    source = builder.SOURCES.parents[1] / "tests" / "ops" / "emulated_mistakes.cpp"
    flags = (*builder.CXX_FLAGS, *builder.EMULATED_FLAGS, *flags, f"-I{builder.SOURCES}")
    builder.run([*compiler, *flags, str(source), "-o", str(program)])
    return program


def run(program, *words, prefix=()):
    environment = os.environ | {"TSAN_OPTIONS": "exitcode=66"}
    return subprocess.run([*prefix, program, *words], capture_output=True, text=True, env=environment, timeout=60)


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("mistakes"))


@pytest.fixture(scope="module")
def races(tmp_path_factory):
    """The same with ThreadSanitizer, and the command that it needs in front of it."""
    builder = cuda_builder()
    try:
        program = compiled(tmp_path_factory.mktemp("races"), *builder.RACE_FLAGS)
    except RuntimeError as error:
        pytest.skip(f"the compiler has no ThreadSanitizer: {error}")
    prefix = builder.without_random_addresses()
    if "FATAL: ThreadSanitizer" in run(program, "Leaves", "right", prefix=prefix).stderr:
        pytest.skip("ThreadSanitizer does not start here")
    return program, prefix


@pytest.mark.parametrize("kernel", SAID)
def test_mistakes_show(mistakes, kernel):
    wrong, right = run(mistakes, kernel), run(mistakes, kernel, "right")
    assert (wrong.returncode, wrong.stdout.strip()) == (1, SAID[kernel])
    assert (right.returncode, right.stdout) == (0, "")


@pytest.mark.parametrize("kernel", sorted({*SAID, *RACES}))
def test_races_are_found(races, kernel):
    program, prefix = races
    if kernel in RACES:
        wrong = run(program, kernel, prefix=prefix)
        assert wrong.returncode == 66 and "WARNING: ThreadSanitizer: data race" in wrong.stderr
    right = run(program, kernel, "right", prefix=prefix)
    assert (right.returncode, right.stderr) == (0, "")
