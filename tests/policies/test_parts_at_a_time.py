"""What is read or multiplied part by part comes to what it would as a whole."""

import pytest
import torch

from tests.policies.sampling import for_parts, newest_queries, random_entries, rope
from vllm_kvmerge.ops import similarity
from vllm_kvmerge.policies import CompressionContext
from vllm_kvmerge.policies import entries as entries_module
from vllm_kvmerge.policies.mergers import residual
from vllm_kvmerge.policies.selectors import Critical, ExpectedAttention, KeyDiff, KeyNorm, ValueLeverage


def test_joining_in_parts(monkeypatch):
    """None of the slots nearly ties with another."""
    entries, index = random_entries(2, num_heads=3, n=300, head_size=32), torch.arange(300).expand(3, -1)
    weights, found = torch.arange(1.0, 13).repeat(3, 1), []
    for size in (288, 287, 144, 7):
        monkeypatch.setattr(residual, "MAX_JOINING", size)
        found.append(residual._join(entries, index[:, :12], index[:, 12:], torch.ones(3, 288), weights))
    assert all(torch.equal(part, whole) for parts in found for part, whole in zip(parts, found[0], strict=True))


@pytest.mark.parametrize(
    "selector",
    [
        KeyNorm(),
        KeyDiff(before_rope=True),
        ValueLeverage(),
        Critical(window_size=2, kernel_size=1),
        ExpectedAttention(),
    ],
    ids=lambda s: s.name,
)
def test_selectors_that_read_all_keys_or_values(selector, monkeypatch):
    entries = random_entries(1, num_heads=3, n=100, num_dead=5)
    weights = torch.randn(3, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    known = {"output_weights": weights, "queries": newest_queries(weights, 100), "rotation": rope(8)}
    context = for_parts(CompressionContext.of_layer(entries, 40, 100, at_prompt_end=True, **known))
    masks = []
    for size in (1024, 100, 33, 7):
        monkeypatch.setattr(entries_module, "PART_ENTRIES", size)
        protected = selector.protected(entries, context)
        masks.append(selector.select(entries, entries.scores, protected, context))
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert len(list(entries.parts())) == 15


@pytest.mark.parametrize(
    ("module", "limit", "number"), [(entries_module, "PART_ENTRIES", 7), (similarity, "MAX_SIMILARITY_BYTES", 840)]
)
def test_comparing_in_parts(monkeypatch, module, limit, number):
    entries = random_entries(2, num_heads=2, n=90)
    index = torch.arange(90).expand(2, -1)
    usable = torch.ones(2, 30, dtype=torch.bool)
    whole = entries.most_similar(index[:, 30:], index[:, :30], usable)
    monkeypatch.setattr(module, limit, number)
    parts = entries.most_similar(index[:, 30:], index[:, :30], usable)
    torch.testing.assert_close(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])
