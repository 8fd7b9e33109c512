"""What attention on the CPU makes of the rows of a batch."""

from types import SimpleNamespace

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

from tests.engine.test_plain_operator import common_metadata
from tests.ops.conftest import CacheMaker
from vllm_kvmerge.engine.attention.compressed import head_pages
from vllm_kvmerge.engine.attention.cpu import MergeableAttentionBuilder
from vllm_kvmerge.engine.attention.rows import PLAIN, BatchRow
from vllm_kvmerge.ops import HeadPages

HEADS, SIZE = 2, 16


def test_fronts_are_attended_to_in_steps_of_one_token_each(monkeypatch):
    """Where our operator attends for plain requests, too."""
    common = common_metadata([40, 50])
    stock = CPUAttentionMetadata(2, 1, common.query_start_loc, 0, common.seq_lens, None, None, None)
    for name, function in {
        "__init__": lambda self, config: vars(self).update(vllm_config=config),
        "build": lambda *args: stock,
    }.items():
        monkeypatch.setattr(CPUAttentionMetadataBuilder, name, function)
    builder = MergeableAttentionBuilder(SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4)))
    builder.attends_plain, builder.rows = True, [PLAIN, BatchRow(front=20, tail=30)]
    found = builder.build(0, common).ours
    assert (found.fronts.tolist(), found.tails.tolist()) == ([0, 20], [0, 30])


def test_pages_of_some_rows_leave_the_fronts_of_others_as_they_are():
    """A row without pages has none in any layer, and one with fewer than another has its own first."""
    layers = [CacheMaker(0, HEADS, SIZE, 32, torch.float32).pages] * 3
    few, many = (
        HeadPages(layers, torch.arange(3 * HEADS * count).view(3, HEADS, count), torch.full((3, HEADS), 32 * count))
        for count in (1, 4)
    )
    rows = [BatchRow(front=64, tail=80), BatchRow(128, 150, pages=many), BatchRow(32, 40, pages=few)]
    assert head_pages(rows[:1]) is None
    found = head_pages(rows)
    assert found is not None and len(found) == 3
    for layer, pages in enumerate(found):
        assert (pages.ids[0] < 0).all()
        for row, own in ((1, many), (2, few)):
            assert torch.equal(pages.ids[row, :, : own.ids.shape[2]], own.ids[layer])
            assert torch.equal(pages.fronts[row], own.fronts[layer])
