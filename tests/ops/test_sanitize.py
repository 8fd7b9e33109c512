"""csrc/cuda/sanitize.py without compute-sanitizer: what it says, and what it would run."""

import os

import pytest
import torch

from tests.ops.conftest import cuda_module


@pytest.mark.parametrize(
    ("memcheck", "racecheck", "status", "message"),
    [
        (0, 0, 0, "nothing was found"),
        (86, 0, 1, "memcheck found something"),
        (0, 1, 1, "with racecheck pytest ended with 1"),
        (5, 0, 2, "no test was selected"),
    ],
)
def test_all_tools_run_and_what_they_find_is_said(memcheck, racecheck, status, message, monkeypatch, capfd, tmp_path):
    """By a program in the place of compute-sanitizer."""
    calls, program, sanitize = tmp_path / "calls", tmp_path / "compute-sanitizer", cuda_module("sanitize")
    program.write_text(
        f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" >> {calls}\n'
        f"case $2 in memcheck) exit {memcheck};; racecheck) exit {racecheck};; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sanitize, "obstacle", lambda: None)
    assert sanitize.main([]) == status
    assert message in "".join(capfd.readouterr())
    lines = calls.read_text().splitlines()
    assert all(line.startswith("1 --tool ") and "test_cuda.py -k cuda-gpu or on-gpu" in line for line in lines)
    assert status == 2 or [line.split()[2] for line in lines] == list(sanitize.TOOLS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_exits_with_2(capfd):
    assert cuda_module("sanitize").main([]) == 2
    assert capfd.readouterr().err.startswith("the CUDA operators are not checked: there is no ")
