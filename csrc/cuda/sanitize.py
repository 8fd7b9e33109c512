"""The CUDA operators under compute-sanitizer: ``python csrc/cuda/sanitize.py``, or ``make sanitize-cuda``.

Runs their tests on this machine's GPU once for each tool. Exits with 1 where a tool or a test finds something, and
with 2, saying what is missing, where nothing can be run. What a tool finds in kernels of PyTorch is not told apart.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 86
"""Exit status of compute-sanitizer where it found something, to tell it from pytest's."""
NOTHING_RAN = 5
"""pytest's, where no test was selected."""


def sanitizer() -> str | None:
    """compute-sanitizer; None where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    folders = [Path(home) / "bin", Path(home) / "compute-sanitizer"]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=":".join(map(str, folders)))


def obstacle() -> str | None:
    """Why nothing can be run here; None if it can."""
    if sanitizer() is None:
        return "there is no compute-sanitizer: it comes with the CUDA toolkit; put it on PATH, or set CUDA_HOME"
    sys.path.insert(0, str(ROOT))
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU that PyTorch can use"
    from vllm_kvmerge.ops import cuda

    try:
        cuda.library()
    except (OSError, ImportError) as error:
        return str(error)
    return None


def command(tool: str, tests: list[str]) -> list[str]:
    """To run some tests under a tool."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    # A test process asks for much that has nothing to do with kernels; only what they do is looked at.
    options += ["--report-api-errors", "no"]
    if tool in ("racecheck", "synccheck"):
        options += ["--kernel-name", "kns=run_kernel"]  # ours: all others are left alone, which is much faster
    if tool == "memcheck":
        options += ["--padding", "64"]  # bytes behind each allocation that are nobody's
    return [str(sanitizer()), *options, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), metavar="TOOL")
    parser.add_argument("--thin", type=int, default=5, help="run every THIN-th case of each test")
    given = parser.parse_args(arguments)
    if reason := obstacle():
        print(f"the CUDA operators are not checked: {reason}", file=sys.stderr)
        return 2
    # Memory of their own for all tensors: in PyTorch's large blocks a tool sees no tensor's end.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    tests = ["tests/ops/test_cuda.py", "-k", "cuda-gpu or on-gpu", "--thin", str(given.thin)]
    wrong = []
    for tool in given.tools:
        print(f"{tool}:", flush=True)
        status = subprocess.run(command(tool, tests), cwd=ROOT, env=environment).returncode
        if status == NOTHING_RAN:
            print("the CUDA operators are not checked: no test was selected", file=sys.stderr)
            return 2
        if status:
            wrong.append(f"{tool} found something" if status == FOUND else f"with {tool} pytest ended with {status}")
    print("; ".join(wrong) or "nothing was found", file=sys.stderr if wrong else sys.stdout)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
