"""The operators in CUDA C++ (csrc/cuda): attention of decode steps, and compactions in one launch.

Calls that these do not suit are those of ``fallback``. The library is built by csrc/cuda/build.py. A build for the CPU,
which tests load with ``use``, runs the same kernels on CPU tensors.
"""

from vllm_kvmerge.ops.cuda.attention import paged_attention
from vllm_kvmerge.ops.cuda.backend import LIBRARY, description, library, obstacle, runs_on, use
from vllm_kvmerge.ops.cuda.merge import merge_entries

__all__ = [
    "LIBRARY",
    "description",
    "library",
    "merge_entries",
    "obstacle",
    "paged_attention",
    "runs_on",
    "use",
]
