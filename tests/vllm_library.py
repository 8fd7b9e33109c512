"""Which of its libraries of CPU operators vLLM loads, in a test process and in those that it starts.

vLLM asks PyTorch what the processor can do. Python runs ``sitecustomize`` from PYTHONPATH as each process starts: the
one written here makes PyTorch answer as a lesser processor would.

With AMX, vLLM's attention packs bfloat16 keys in a way of its own, which our cache does not, and products of matrices
round otherwise beside other rows. So tests that compare tokens leave AMX unused, unless they are asked for it.

    python -m tests.vllm_library      the libraries that this processor can run, one a line
"""

import os
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

AMX = "_C_AMX"
FEATURES = "avx512", "avx512_bf16", "amx_tile"
LIBRARIES = {"_C": FEATURES[:2], AMX: FEATURES, "_C_AVX512": FEATURES[:1], "_C_AVX2": ()}
"""What each needs a processor to have, as PyTorch calls it; on those that have more, this is left unused. ``_C_AMX`` is
``_C`` where it may use AMX."""

HAS_AVX512 = torch.cpu._is_avx512_supported()
needs_avx512 = pytest.mark.skipif(not HAS_AVX512, reason="needs AVX-512, without which vLLM has no caches of 8 bits")
needs_avx512_bf16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="needs AVX-512 with BF16, without which vLLM's linear attention keeps smaller states and rounds otherwise "
    "beside other requests",
)

ONEDNN_ISA = "ONEDNN_MAX_CPU_ISA"
"""What oneDNN, which asks the processor itself, may use."""

SITE = """
import sys

class Answers:
    '''Sets PyTorch's answers just before vLLM's platform is imported, which asks for them.'''

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "vllm.platforms.cpu":
            Answers.give()

    @staticmethod
    def give():
        import torch
        for feature in {absent!r}:
            setattr(torch.cpu, f"_is_{{feature}}_supported", lambda: False)

if "vllm.platforms.cpu" in sys.modules:  # a conftest has imported it, but no operators yet
    Answers.give()
else:
    sys.meta_path.insert(0, Answers)
"""


def _has(feature: str) -> bool:
    return getattr(torch.cpu, f"_is_{feature}_supported")()


@cache
def runnable() -> list[str]:
    """The libraries that this processor can run, the one that tests take first; none where vLLM has no such choice.

    To be asked before anything has been chosen.
    """
    if not torch.cpu._is_avx2_supported():
        return []
    return [name for name, needs in LIBRARIES.items() if all(map(_has, needs))]


def default() -> str | None:
    """The library to choose where none is asked for; None: vLLM's own choice."""
    return "_C" if AMX in runnable() else None


def choose(library: str) -> tempfile.TemporaryDirectory[str]:
    """Makes vLLM take ``library`` here and in all processes started from here, as long as the answer is kept.

    Raises:
        ValueError: this processor cannot run it.
    """
    if library not in runnable():
        raise ValueError(f"--vllm-library {library}: this processor cannot run it; allowed here: {runnable()}")
    absent = [feature for feature in FEATURES if feature not in LIBRARIES[library]]
    if library == "_C":
        os.environ[ONEDNN_ISA] = "AVX512_CORE_BF16"
    folder = tempfile.TemporaryDirectory(prefix="vllm-library-")
    site = SITE.format(absent=absent)
    (Path(folder.name) / "sitecustomize.py").write_text(site)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder.name, os.environ.get("PYTHONPATH")]))
    exec(site, {})
    return folder


def loaded() -> list[str]:
    """Those that this process has loaded."""
    maps = Path("/proc/self/maps").read_text()
    return [name for name in LIBRARIES if f"/vllm/{name}.abi3.so" in maps]


if __name__ == "__main__":
    print(*runnable(), sep="\n")
