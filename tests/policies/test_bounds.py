"""What another package's part may hold while it works."""

import pytest
import torch

from vllm_kvmerge.policies.bounds import memory_limit
from vllm_kvmerge.policies.errors import OutOfMemory

KIB = 1 << 10


def floats(num_kib: int) -> torch.Tensor:
    return torch.zeros(num_kib * KIB // 4)


@torch.inference_mode()
def test_what_is_freed_views_and_what_was_there_do_not_count():
    given = floats(100)
    with memory_limit(25 * KIB):
        for _ in range(10):
            floats(10) + 1.0  # two at once
        given += 1.0
        kept = given.view(-1)[:5], torch.add(given, 1.0, out=given), floats(20).unbind()[0]
        del kept
        floats(20)


@torch.inference_mode()
@pytest.mark.parametrize("num_kib", [5, 24, 25])
def test_what_is_held_at_once_counts(num_kib):
    held = []
    with (
        pytest.raises(OutOfMemory, match=r"more than 0\.0 MiB \(--compaction-workspace-bytes\)"),
        memory_limit(24 * KIB),
    ):
        for _ in range(6):
            held.append(floats(num_kib)[:1])
    assert len(held) == 24 // num_kib, "it ends where it exceeds the limit"
