"""What is read or multiplied part by part comes to what it would as a whole."""

import pytest
import torch

from tests.policies.sampling import newest_queries, random_entries, rope
from vllm_kvmerge.policies import CompressionContext, Entries
from vllm_kvmerge.policies import entries as entries_module
from vllm_kvmerge.policies.mergers.residual import _join
from vllm_kvmerge.policies.selectors import Critical, ExpectedAttention, KeyDiff, KeyNorm


def join_one_by_one(entries: Entries, head: int, num_slots: int) -> tuple[list[int], list[float]]:
    """The slot of each member (ZSMerge algorithm 1), in float64: the first entries are slots, the others join."""
    keys = entries.keys[head].double()
    slots, weights = keys[:num_slots].clone(), entries.aux[head, :num_slots].double().clone()
    joined = []
    for key in keys[num_slots:]:
        slot = int((slots @ key).argmax())
        weights[slot] += 1
        slots[slot] += (key - slots[slot]) / weights[slot]
        joined.append(slot)
    return joined, weights.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_members", [1, 255, 256, 257, 1000])
def test_members_join_slots_one_after_the_other(num_members, dtype):
    """Whatever the number of members that are compared at a time; none of the slots nearly ties with another."""
    num_slots, num_heads = 12, 3
    entries = random_entries(num_members, num_heads, num_slots + num_members, head_size=32, dtype=dtype)
    entries.aux[:, :num_slots] = torch.arange(1.0, num_slots + 1)
    index = torch.arange(len(entries)).expand(num_heads, -1)
    slots, members = index[:, :num_slots], index[:, num_slots:]
    weights = torch.ones(num_heads, num_members, dtype=dtype)
    joined, total = _join(entries, slots, members, weights, entries.aux[:, :num_slots].clone())
    for head in range(num_heads):
        expected, expected_weights = join_one_by_one(entries, head, num_slots)
        assert joined[head].tolist() == expected
        assert total[head].tolist() == expected_weights


@pytest.mark.parametrize(
    "selector",
    [KeyNorm(), KeyDiff(), Critical(window_size=2, kernel_size=1), ExpectedAttention()],
    ids=lambda s: s.name,
)
def test_selectors_that_read_all_keys_or_values(selector, monkeypatch):
    entries = random_entries(1, num_heads=3, n=100, num_dead=5)
    weights = torch.randn(3, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    known = {"output_weights": weights, "queries": newest_queries(weights, 100), "rotation": rope(8)}
    context = CompressionContext.of_layer(entries, 40, 100, at_prompt_end=True, **known)
    masks = []
    for size in (1024, 100, 33, 7):
        monkeypatch.setattr(entries_module, "PART_ENTRIES", size)
        protected = selector.protected(entries, context)
        masks.append(selector.select(entries, entries.scores, protected, context))
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert len(list(entries.parts())) == 15


def test_comparing_in_parts(monkeypatch):
    entries = random_entries(2, num_heads=2, n=90)
    index = torch.arange(90).expand(2, -1)
    usable = torch.ones(2, 30, dtype=torch.bool)
    whole = entries.most_similar(index[:, 30:], index[:, :30], usable)
    monkeypatch.setattr(entries_module, "PART_ENTRIES", 7)
    parts = entries.most_similar(index[:, 30:], index[:, :30], usable)
    torch.testing.assert_close(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])
