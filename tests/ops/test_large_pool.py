"""Blocks at both ends of a pool of 120 GiB: offsets beyond 32 bits. It is a sparse file, of which few pages are ever
touched."""

import mmap
import os
import tempfile
from functools import partial

import pytest
import torch

from tests.entries import gather_entries
from tests.ops.conftest import SUM, TOLERANCE, CacheMaker, batch_of, relative_error, statistics
from tests.ops.test_operators import dense_attention
from vllm_kvmerge.ops import Rows, SequenceLayers, cell_bytes, cpu, reference

pytestmark = pytest.mark.slow

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NATIVE = cpu.levels() if cpu.LIBRARY.exists() else []
OPERATORS = ["triton"] if INTERPRETED else ["plain-torch", *NATIVE]
ATTENDING = OPERATORS if INTERPRETED else [*OPERATORS, "cuda"]
POOL_BYTES = 120 << 30
HEADS, GROUPS, HEAD_SIZE, BLOCK_SIZE = 2, 2, 64, 16


class LargeMaker(CacheMaker):
    """A cache of 120 GiB, whose sequences take blocks from both ends and the middle by turns."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(7, HEADS, HEAD_SIZE, BLOCK_SIZE, dtype)
        elements = cell_bytes(HEAD_SIZE, dtype) // dtype.itemsize
        num_blocks = POOL_BYTES // (HEADS * BLOCK_SIZE * cell_bytes(HEAD_SIZE, dtype))
        size = num_blocks * HEADS * BLOCK_SIZE * elements * dtype.itemsize
        with tempfile.TemporaryFile() as file:
            file.truncate(size)  # without taking room on the disk
            self.memory = mmap.mmap(file.fileno(), size)
        cache = torch.frombuffer(self.memory, dtype=dtype).view(num_blocks, HEADS, BLOCK_SIZE, elements)
        self.cache, self.pages = cache, self.views(cache)
        ends = zip(range(1, 100), range(num_blocks - 1, 0, -1), range(num_blocks // 2, num_blocks), strict=False)
        self._free = [block for blocks in ends for block in blocks]


@pytest.mark.parametrize("operators", ATTENDING, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_at_both_ends_of_a_large_pool(operators, dtype):
    maker = LargeMaker(dtype)
    assert maker.pages.keys.stride(0) * len(maker.pages.keys) * dtype.itemsize > 100 << 30
    sequences = [maker.sequence(37, 200, 231), maker.sequence(0, 0, 77), maker.sequence(32, 64, 90)]
    blocks = torch.cat([sequence.blocks for sequence in sequences])
    assert {0, 1} <= {int(block) * 2 // len(maker.pages.keys) for block in blocks}
    query = maker.randn(3, HEADS * GROUPS, HEAD_SIZE).to(dtype)
    output = torch.full_like(query, torch.nan)
    before = [statistics(maker.pages, [s])[0] for s in sequences]
    operators.paged_attention(query, maker.pages, batch_of(sequences, [1] * 3, [SUM, None, SUM]), 0.125, output)
    for row, sequence in enumerate(sequences):
        expected, _, (probabilities,) = dense_attention(query[row, None], sequence, 0.125)
        assert relative_error(output[row], expected[0]) < TOLERANCE[dtype]
        after, _ = statistics(maker.pages, [sequence])
        scores = before[row] * SUM.decay + probabilities.sum(1) if row != 1 else before[row]
        torch.testing.assert_close(after.double(), scores.double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_compaction_from_both_ends_of_a_large_pool(operators, dtype):
    """With newer tokens, which the operators write first."""
    maker = LargeMaker(dtype)
    sequence, blocks = maker.sequence(37, 200, 231), maker.sequence(0, 0, 40).blocks
    key, value = maker.randn(2, 31, HEADS, HEAD_SIZE).to(dtype)
    slots = torch.arange(200, 231)
    slots = sequence.blocks[slots // BLOCK_SIZE].long() * BLOCK_SIZE + slots % BLOCK_SIZE
    operators.write_tokens(maker.pages, slots, key, value)
    sequence.keys[:, 37:], sequence.values[:, 37:] = key.transpose(0, 1).double(), value.transpose(0, 1).double()
    seq_layers = SequenceLayers.of(maker.pages, sequence.blocks, 37, 200, 231)
    kept = torch.arange(28, 68).repeat(HEADS, 1)  # of the front and of the tail
    new = torch.full((HEADS, 1, HEAD_SIZE), 0.5)
    metadata = *torch.rand(3, HEADS, 40), kept
    rows = Rows(torch.full((HEADS, 1), 7), new, 2.0 * new)
    merge = getattr(operators, "merge_entries", None) or partial(reference.merge_entries, operators=operators)
    merge(seq_layers, blocks[None], kept, metadata, rows)
    found = gather_entries(maker.pages, blocks, 40, 48, 48)
    for plane, merged in (("keys", 0.5), ("values", 1.0)):
        expected = getattr(sequence, plane)[:, 28:68].clone()
        expected[:, 7] = merged
        torch.testing.assert_close(getattr(found, plane).double(), expected)
    for plane, expected in zip(("log_votes", "scores", "aux", "positions"), metadata, strict=True):
        assert torch.equal(getattr(found, plane), expected)
