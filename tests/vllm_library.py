"""Which of its libraries of CPU operators vLLM loads, in a test process and in those that it starts.

vLLM asks PyTorch what the processor can do. Python runs ``sitecustomize`` from PYTHONPATH as each process starts: the
one written here makes PyTorch answer as a lesser processor would.

    python -m tests.vllm_library      the libraries that this processor can run, one a line
"""

import os
import tempfile
from functools import cache
from pathlib import Path

import torch

LIBRARIES = {"_C": ("avx512", "avx512_bf16", "amx_tile"), "_C_AVX512": ("avx512",), "_C_AVX2": ()}
"""What each needs a processor to have, as PyTorch calls it; those that run on more leave it unused."""

SITE = """
import sys

class Answers:
    '''Sets PyTorch's answers just before vLLM's platform is imported, which asks for them.'''

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "vllm.platforms.cpu":
            import torch
            for feature in {absent!r}:
                setattr(torch.cpu, f"_is_{{feature}}_supported", lambda: False)

sys.meta_path.insert(0, Answers)
"""


def _has(feature: str) -> bool:
    return getattr(torch.cpu, f"_is_{feature}_supported")()


@cache
def runnable() -> list[str]:
    """The libraries that this processor can run, the one that vLLM takes first; none where vLLM has no such choice.

    To be asked before anything has been chosen.
    """
    if not torch.cpu._is_avx2_supported():
        return []
    return [name for name, needs in LIBRARIES.items() if all(map(_has, needs[:2]))]


def choose(library: str) -> tempfile.TemporaryDirectory[str]:
    """Makes vLLM take ``library`` here and in all processes started from here, as long as the answer is kept.

    Raises:
        ValueError: this processor cannot run it.
    """
    if library not in runnable():
        raise ValueError(f"--vllm-library {library}: this processor cannot run it; allowed here: {runnable()}")
    absent = [feature for feature in LIBRARIES["_C"] if feature not in LIBRARIES[library]]
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
