"""The operators in CUDA C++ (csrc/cuda): attention of decode steps.

Calls that these do not suit are those of ``fallback``. The library is built by csrc/cuda/build.py. A build for the CPU,
which tests load with ``use``, runs the same kernels on CPU tensors.
"""

from vllm_kvmerge.ops.cuda.attention import paged_attention
from vllm_kvmerge.ops.cuda.backend import LIBRARY, description, library, obstacle, runs_on, use

__all__ = [
    "LIBRARY",
    "description",
    "library",
    "obstacle",
    "paged_attention",
    "runs_on",
    "use",
]
