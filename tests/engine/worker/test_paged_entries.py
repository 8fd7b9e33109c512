"""Entries in pages against the same entries, dense."""

import pytest
import torch

from tests.entries import gather_entries
from tests.ops.conftest import CacheMaker
from tests.policies.sampling import random_update, stack_rows
from vllm_kvmerge.engine.worker.paged_entries import PagedEntries
from vllm_kvmerge.ops import ROW_PLANES, SequenceLayers
from vllm_kvmerge.policies.base import Entries

SEQUENCES = [(0, 0, 60), (20, 100, 140), (37, 64, 87)]
"""front, tail, seq_len; 60 live entries each."""


def places(dense: Entries, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """All in some order for each row, and the first 20 of them, of which some are left out."""
    index = torch.rand(len(dense.positions), 60, generator=generator).argsort(1)
    some = index[:, :20]
    return index, some.masked_fill(torch.rand(some.shape, generator=generator) < 0.2, -1)


def sample(dtype: torch.dtype) -> tuple[PagedEntries, Entries]:
    maker = CacheMaker(1, 2, 16, 32, dtype)
    maker.pages.scores.copy_(maker.randn(*maker.pages.scores.shape))
    maker.pages.aux.copy_(maker.randn(*maker.pages.aux.shape))
    made = [maker.sequence(*shape, num_dead=min(3, shape[0])) for shape in SEQUENCES]
    units = SequenceLayers(
        [maker.pages],
        torch.zeros(len(made), dtype=torch.int64),
        torch.nn.utils.rnn.pad_sequence([s.blocks for s in made], batch_first=True),
        torch.tensor([(s.front, s.tail, s.seq_len) for s in made]),
    )
    dense = [gather_entries(maker.pages, s.blocks, s.front, s.tail, s.seq_len) for s in made]
    return PagedEntries.gather(units), stack_rows(dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [None, [4], [5, 0, 3]])
def test_reads_are_those_of_the_dense_entries(dtype, heads):
    paged, dense = sample(dtype)
    if heads is not None:
        assert paged.keys is not None  # what has been read of all heads must not be taken for some
        paged, dense = paged.of_rows(heads), dense.of_rows(heads)
    generator = torch.Generator().manual_seed(2)
    index, some = places(dense, generator)
    for name in ("keys_at", "values_at"):
        assert torch.equal(getattr(paged, name)(some), getattr(dense, name)(some))
    usable = torch.rand(len(index), 40, generator=generator) < 0.8
    pairs = index[:, :20], index[:, 20:], usable
    torch.testing.assert_close(paged.most_similar(*pairs), dense.most_similar(*pairs))
    for name in ("keys", "values", "log_votes", "scores", "aux", "positions", "is_live"):
        assert torch.equal(getattr(paged, name), getattr(dense, name)), name
    hidden = dense.positions % 3 == 0
    view, expected = paged.without(hidden), dense.without(hidden)
    assert torch.equal(view.is_live, expected.is_live) and torch.equal(view.log_votes, expected.log_votes)
    assert torch.equal(expected.is_live, dense.is_live & ~hidden)
    assert torch.equal(view.keys_at(some), dense.keys_at(some))
    assert torch.equal(paged.is_live, dense.is_live)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_an_update_leaves_is_that_of_the_dense_entries(dtype):
    paged, dense = sample(dtype)
    generator = torch.Generator().manual_seed(3)
    update = random_update(dense, 60, 20, generator)
    update.keys, update.values = (rows.to(dtype).float() for rows in (update.keys, update.values))
    view, expected = update.view(paged), update.apply(dense)
    index, some = places(dense, generator)
    for name in ("keys_at", "values_at"):
        assert torch.equal(getattr(view, name)(some), getattr(expected, name)(some))
    pairs = some, index[:, 20:], expected.is_live.gather(1, index[:, 20:])
    torch.testing.assert_close(view.most_similar(*pairs), expected.most_similar(*pairs))
    row, shares = torch.zeros_like(some), torch.rand(some.shape, generator=generator).masked_fill(some < 0, 0.0)
    for plane in ROW_PLANES:
        mixing = plane, some, row, shares, index[:, 30:34]
        torch.testing.assert_close(view.mixed(*mixing), expected.mixed(*mixing))


@pytest.mark.parametrize("fusion", ["sum", "max"])
def test_queries_do_not_attend_to_hidden_entries(fusion):
    paged, dense = sample(torch.bfloat16)
    hidden = dense.positions >= dense.positions.amax(1, keepdim=True) - 20
    hidden[0] = True
    queries = torch.randn(len(hidden), 2, 3, dense.keys.shape[2], generator=torch.Generator().manual_seed(3))
    positions = dense.positions.amax(1, keepdim=True) - torch.tensor([2, 1, 0])
    fused = paged.without(hidden).fused_attention(queries, positions, 0.2, fusion)
    torch.testing.assert_close(fused, dense.without(hidden).fused_attention(queries, positions, 0.2, fusion))
    assert (fused[hidden] == 0.0).all() and (fused[1:].sum(1) > 0.9).all()
