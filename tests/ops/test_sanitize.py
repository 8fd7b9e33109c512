"""csrc/cuda/sanitize.py without compute-sanitizer: what it says, and what it would run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "csrc" / "cuda" / "sanitize.py"


@pytest.fixture
def sanitize():
    spec = importlib.util.spec_from_file_location("cuda_sanitize", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stand_in(sanitize, monkeypatch, tmp_path):
    """A program in the place of compute-sanitizer, which exits with what its tool's name stands for."""
    calls = tmp_path / "calls"
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" >> {calls}\n'
        "case $2 in memcheck) exit $MEMCHECK;; racecheck) exit $RACECHECK;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sanitize, "obstacle", lambda: None)
    return calls


@pytest.mark.parametrize(
    ("memcheck", "racecheck", "status", "message"),
    [
        (0, 0, 0, "nothing was found"),
        (86, 0, 1, "memcheck found something"),
        (0, 1, 1, "with racecheck pytest ended with 1"),
        (5, 0, 2, "no test was selected"),
    ],
)
def test_all_tools_run_and_what_they_find_is_said(
    sanitize, stand_in, monkeypatch, capfd, memcheck, racecheck, status, message
):
    monkeypatch.setenv("MEMCHECK", str(memcheck))
    monkeypatch.setenv("RACECHECK", str(racecheck))
    assert sanitize.main([]) == status
    assert message in "".join(capfd.readouterr())
    calls = stand_in.read_text().splitlines()
    assert all(
        line.startswith("1 --tool ") and "test_cuda_head_pages.py -k cuda-gpu or on-gpu" in line for line in calls
    )
    if status != 2:
        assert [line.split()[2] for line in calls] == list(sanitize.TOOLS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_exits_with_2(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("the CUDA operators are not checked: there is no ")
