"""Tables of head pages in the CPU's memory, read as kernels read them: from their addresses."""

import ctypes

import torch
from torch import Tensor

from vllm_kvmerge.ops import AttentionBatch, HeadPages
from vllm_kvmerge.ops.types import PageTables


def _numbers(address: int, count: int) -> Tensor:
    return torch.tensor((ctypes.c_int32 * count).from_address(address)[:], dtype=torch.int64)


def read(tables: PageTables) -> HeadPages:
    """The pages of the layer that attends."""
    num_layers, num_heads = len(tables.layers), tables.layers[0].num_kv_heads
    rows, coded = [], torch.zeros(len(tables.addresses), dtype=torch.uint8)
    for row, address in enumerate(tables.addresses.tolist()):
        room = 0 if address == 0 else int(_numbers(address, 1))
        lists = torch.zeros(num_heads, 1)
        if address:
            numbers = _numbers(address, 1 + num_layers * num_heads * (1 + room) + 1)
            lists, coded[row] = numbers[1:-1].view(num_layers, num_heads, 1 + room)[tables.layer], numbers[-1]
        rows.append(lists)
    assert tables.coded or not coded.any(), "a kernel would not look"
    width = max(2, *(lists.shape[1] for lists in rows))
    ids = torch.full((len(rows), num_heads, width - 1), -1)
    for row, lists in zip(ids, rows, strict=True):
        row[:, : lists.shape[1] - 1] = lists[:, 1:]
    return HeadPages(tables.layers, ids, torch.stack([lists[:, 0].long() for lists in rows]), coded)


def for_the_reference(batch: AttentionBatch) -> AttentionBatch:
    """The batch as the PyTorch reference takes it."""
    pages = None if batch.tables is None else read(batch.tables)
    return AttentionBatch(*batch.tensors, batch.max_query_len, pages)
