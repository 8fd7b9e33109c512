"""The emulation of a GPU (csrc/cuda/emulated.h) finds the mistakes that it is there for."""

import os
import shlex
import shutil
import subprocess

import pytest

from tests.ops.conftest import cuda_module

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


@pytest.mark.parametrize("with_sanitizer", [False, True])
def test_mistakes_are_found(with_sanitizer, tmp_path):
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no C++ compiler {compiler[0]!r}")
    builder, program = cuda_module("build"), tmp_path / "mistakes"
    source = builder.SOURCES.parents[1] / "tests" / "ops" / "emulated_mistakes.cpp"
    flags = [*builder.CXX_FLAGS, *builder.EMULATED_FLAGS, *(builder.RACE_FLAGS if with_sanitizer else [])]
    command = [*(builder.without_random_addresses() if with_sanitizer else []), program]

    def run(*arguments):
        environment = os.environ | {"TSAN_OPTIONS": "exitcode=66"}
        return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, timeout=60)

    try:
        builder.run([*compiler, *flags, f"-I{builder.SOURCES}", str(source), "-o", str(program)])
    except RuntimeError as error:
        pytest.skip(f"the compiler has no ThreadSanitizer: {error}") if with_sanitizer else pytest.fail(str(error))
    if "FATAL: ThreadSanitizer" in run("Leaves", "right").stderr:
        pytest.skip("ThreadSanitizer does not start here")
    for kernel in SAID.keys() | RACES if with_sanitizer else SAID:
        wrong, right = run(kernel), run(kernel, "right")
        assert (right.returncode, right.stderr) == (0, "")
        if not with_sanitizer:
            assert (wrong.returncode, wrong.stdout.strip()) == (1, SAID[kernel])
        elif kernel in RACES:
            assert wrong.returncode == 66 and "ThreadSanitizer: data race" in wrong.stderr
