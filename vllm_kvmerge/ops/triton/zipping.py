"""ZIP-merging of entries in Triton."""

import torch
from torch import Tensor

from vllm_kvmerge.ops.triton import zip_kernels
from vllm_kvmerge.ops.triton.plan import power_of_two
from vllm_kvmerge.ops.types import PLAIN_SOFTMAX, ScoreMode, Softmax
from vllm_kvmerge.ops.zipping import ZIP_MODES, ZipGroups, ZipMode, ZipPlanes

BLOCK_I, BLOCK_K = 16, 32
"""Sources of a program, and those that it compares them with at a time."""


def zip_groups(
    sources: Tensor,
    targets: Tensor,
    joins: Tensor,
    planes: ZipPlanes,
    mode: ScoreMode,
    zip_mode: ZipMode,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> ZipGroups:
    def results(dtype: torch.dtype, count: int) -> list[Tensor]:
        return [torch.empty(sources.shape, dtype=dtype, device=sources.device) for _ in range(count)]

    groups = ZipGroups(*results(torch.int64, 3), *results(torch.float32, 4), *results(torch.int64, 1))
    if sources.numel():
        votes, scores, counts, positions, protected, log_scores, log_norms = (plane.contiguous() for plane in planes)
        num_rows, num_scores, n = log_scores.shape
        zip_kernels.zip_groups[(num_rows, -(-sources.shape[1] // BLOCK_I))](
            sources.contiguous(), targets.contiguous(), joins.contiguous().view(torch.uint8), votes, scores, counts,
            positions, protected.view(torch.uint8), log_scores, log_norms, *groups, n, sources.shape[1], mode.code,
            ZIP_MODES.index(zip_mode),
            G=num_scores, BLOCK_G=power_of_two(num_scores), CAP=softmax.cap, BLOCK_I=BLOCK_I, BLOCK_K=BLOCK_K,
            num_warps=4,
        )  # fmt: skip
    return groups
