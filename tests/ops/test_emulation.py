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
RACES = {"ReadsEarly", "OverwritesEarly", "Shuffles", "MeetsInWarps", "Collides"}
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


def run(*command):
    environment = os.environ | {"TSAN_OPTIONS": "exitcode=66"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_mistakes_show(tmp_path):
    program = compiled(tmp_path)
    for kernel, said in SAID.items():
        wrong, right = run(program, kernel), run(program, kernel, "right")
        assert (wrong.returncode, wrong.stdout.strip()) == (1, said)
        assert (right.returncode, right.stdout) == (0, "")


def test_races_are_found(tmp_path):
    """With ThreadSanitizer."""
    builder = cuda_builder()
    try:
        command = *builder.without_random_addresses(), compiled(tmp_path, *builder.RACE_FLAGS)
    except RuntimeError as error:
        pytest.skip(f"the compiler has no ThreadSanitizer: {error}")
    if "FATAL: ThreadSanitizer" in run(*command, "Leaves", "right").stderr:
        pytest.skip("ThreadSanitizer does not start here")
    for kernel in SAID.keys() | RACES:
        wrong, right = run(*command, kernel), run(*command, kernel, "right")
        assert kernel not in RACES or (wrong.returncode == 66 and "ThreadSanitizer: data race" in wrong.stderr)
        assert (right.returncode, right.stderr) == (0, "")
