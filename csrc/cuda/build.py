"""Builds the CUDA operators into the package: ``python csrc/cuda/build.py``, or ``make cuda``. Needs nvcc (12.4 or so).

The library holds machine code for compute capabilities 8.0 and 9.0 (sm_90a), and PTX of 8.0, which a driver compiles
for other GPUs of 8.0 and above. It is no part of ``pip install``: a machine without a GPU has no use for it.
``--emulated`` builds the same kernels for the CPU instead, with the C++ compiler alone, for tests; ``--races`` with it,
for ThreadSanitizer, which must be in the process that loads them first (``make races``).
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
PACKAGE = SOURCES.parents[1] / "vllm_kvmerge" / "ops" / "cuda"
CXX_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
# Kernels look at chunks of 16 bytes as elements.
EMULATED_FLAGS = ["-fno-strict-aliasing", "-Wno-maybe-uninitialized"]
RACE_FLAGS = ["-fsanitize=thread", "-g", "-Wno-tsan"]
ARCHITECTURES = {"80": ["arch=compute_80,code=[sm_80,compute_80]"], "90a": ["arch=compute_90a,code=sm_90a"]}
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden"]


def nvcc() -> str | None:
    """The CUDA compiler: that on PATH, in CUDA_HOME, or where the toolkit installs itself; None if there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(str(Path(home) / "bin" / "nvcc"))


def without_random_addresses() -> list[str]:
    """What to put before a command, since ThreadSanitizer knows only some places of a process's memory."""
    return ["setarch", "-R"] if shutil.which("setarch") else []


def run(command: list[str]) -> str:
    """What a command prints on both streams. Raises RuntimeError, with all of it, where it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise RuntimeError(f"cannot run {command[0]!r}: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}")
    return done.stdout


@dataclass(frozen=True)
class Usage:
    """What a kernel takes, by ``ptxas -v``: registers of a thread, and bytes of its stack, where spills go."""

    kernel: str
    target: str
    registers: int
    stack: int


def usage(said: str) -> list[Usage]:
    """Of each kernel that nvcc compiled with ``-Xptxas -v`` and said this of."""
    kernel = r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers"
    return [
        Usage(name, target, int(registers), int(stack))
        for name, target, stack, registers in re.findall(kernel, said, re.DOTALL)
    ]


def build(output: Path, scratch: Path, emulated: bool = False, extra_flags: tuple[str, ...] = ()) -> str:
    """Compiles and links; what the compilers had to say. Raises RuntimeError or ImportError where that fails.

    extra_flags: for the compiler and the linker of the emulated kernels.
    """
    import tvm_ffi.libinfo

    compiler = shlex.split(os.environ.get("CXX", "c++"))
    includes = {tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()}
    module, kernels = str(scratch / "module.o"), str(scratch / "kernels.o")
    scratch.mkdir(parents=True, exist_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    flags = [*CXX_FLAGS, *(EMULATED_FLAGS if emulated else []), *extra_flags]
    said = run(
        [*compiler, *flags, *(f"-isystem{path}" for path in sorted(includes)), "-c", str(SOURCES / "module.cpp"),
         "-o", module]
    )  # fmt: skip
    source = str(SOURCES / "kernels.cpp")
    if emulated:
        said += run([*compiler, *flags, "-c", source, "-o", kernels])
        return said + run([*compiler, *extra_flags, "-shared", module, kernels, "-o", str(output)])
    cuda = nvcc()
    if cuda is None:
        raise RuntimeError("there is no nvcc: install the CUDA toolkit, or set CUDA_HOME to where it is")
    targets = [flag for codes in ARCHITECTURES.values() for code in codes for flag in ("-gencode", code)]
    named = f'-DKVM_TARGETS="{" ".join("sm_" + name for name in ARCHITECTURES)}"'
    said += run([cuda, *NVCC_FLAGS, *targets, named, "--threads", "0", "-x", "cu", "-c", source, "-o", kernels])
    return said + run([cuda, "-shared", "-cudart", "static", module, kernels, "-o", str(output)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="the library; default: in the package, or build/ if emulated")
    parser.add_argument("--emulated", action="store_true", help="for the CPU, for tests")
    parser.add_argument("--races", action="store_true", help="emulated, and races between threads are found")
    arguments = parser.parse_args()
    emulated = arguments.emulated or arguments.races
    name = "_cuda_races.so" if arguments.races else "_cuda_emulated.so" if emulated else "_cuda.so"
    output = arguments.output or (SOURCES.parents[1] / "build" if emulated else PACKAGE) / name
    flags = tuple(RACE_FLAGS) if arguments.races else ()
    try:
        kernels = usage(build(output, SOURCES.parents[1] / "build" / "cuda" / name, emulated, flags))
    except (RuntimeError, ImportError) as error:
        print(f"the CUDA operators are not built: {error}", file=sys.stderr)
        return 1
    for kernel in kernels:
        if kernel.stack:
            print(f"{kernel.target}: {kernel.kernel} has a stack of {kernel.stack} bytes", file=sys.stderr)
    print(f"{output}: {len(kernels)} kernels" if kernels else output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
