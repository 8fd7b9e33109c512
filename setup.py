"""Builds the native CPU operators (csrc/cpu) into the package; everything else is in pyproject.toml.

One shared library without a Python ABI: the kernels once per instruction set level, the rest once. Where it cannot be
built, the package is installed without it and runs the PyTorch reference.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

SOURCES = Path("csrc/cpu")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
X86_LEVELS = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": AVX512_BF16,
    "avx512_amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
}
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
]
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def build_library(output: Path, scratch: Path, extra_flags: list[str]) -> None:
    """Compiles and links the operators. Raises CompileError where a compiler is missing or fails.

    extra_flags: for compiler and linker. Levels that the compiler does not know are left out.
    """
    import tvm_ffi.libinfo

    compiler = shlex.split(os.environ.get("CXX", "c++"))
    includes = {tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()}
    flags = [*FLAGS, *(f"-isystem{path}" for path in sorted(includes)), *extra_flags]
    scratch.mkdir(parents=True, exist_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)

    def run(arguments: list[str]) -> None:
        try:
            result = subprocess.run([*compiler, *arguments], capture_output=True, text=True)
        except OSError as error:
            raise CompileError(f"cannot run {compiler[0]!r}: {error}") from error
        if result.returncode:
            raise CompileError(f"{shlex.join([*compiler, *arguments])}\n{result.stdout}{result.stderr}")
        sys.stderr.write(result.stderr)

    def compile_one(source: str, name: str, options: list[str]) -> str:
        target = str(scratch / f"{name}.o")
        run([*flags, *options, "-c", str(SOURCES / f"{source}.cpp"), "-o", target])
        return target

    def compile_level(level: str, options: list[str]) -> str | None:
        try:
            return compile_one("kernels", level, [f"-DKVM_LEVEL={level}", *options])
        except CompileError as error:
            if level == "baseline":
                raise
            print(f"native operators: no {level} kernels with this compiler: {error}", file=sys.stderr)
            return None

    levels = {"baseline": [], **(X86_LEVELS if platform.machine().lower() in ("x86_64", "amd64") else {})}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        others = [pool.submit(compile_one, path.stem, path.stem, []) for path in sorted(SOURCES.glob("*.cpp"))
                  if path.stem not in ("kernels", "module")]  # fmt: skip
        compiled = dict(zip(levels, pool.map(compile_level, levels, levels.values()), strict=True))
        objects = [target for target in compiled.values() if target] + [other.result() for other in others]
    known = [f"-DKVM_HAVE_{level}" for level, target in compiled.items() if target]
    objects.append(compile_one("module", "module", known))
    # tvm-ffi's and OpenMP's symbols are left to the libraries that the process has loaded already.
    run(["-shared", *extra_flags, *objects, "-o", str(output)])


class BuildNative(build_ext):
    """Runs the compiler above; the library's name carries no Python version."""

    user_options = [
        *build_ext.user_options,
        ("sanitize", None, "build with address and undefined behaviour sanitizers"),
    ]
    boolean_options = [*build_ext.boolean_options, "sanitize"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.sanitize = False

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            flags = SANITIZE if self.sanitize else []
            build_library(Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp), flags)
        except (CompileError, ImportError) as error:
            print(f"native operators are not built, the PyTorch reference runs instead: {error}", file=sys.stderr)
            raise CompileError("native operators are not built") from error


class BuildWithConfigs(build_py):
    """Puts configs/ into the package, where commands find it outside a checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("configs", Path(self.build_lib) / "vllm_kvmerge" / "configs", dirs_exist_ok=True)


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python 3; for any platform where nothing was compiled."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform_tag = super().get_tag()
        built = list(Path(self.bdist_dir or "").rglob("_native.so"))
        return ("py3", "none", platform_tag if built else "any")


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


if __name__ == "__main__":
    setup(
        distclass=NativeDistribution,
        ext_modules=[Extension("vllm_kvmerge.ops._native", [str(SOURCES / "module.cpp")], optional=True)],
        cmdclass={"build_ext": BuildNative, "build_py": BuildWithConfigs, "bdist_wheel": PlatformWheel},
    )
