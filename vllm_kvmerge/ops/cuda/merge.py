"""Compactions in CUDA C++, in one launch."""

import torch
from torch import Tensor

from vllm_kvmerge.ops.cuda import backend
from vllm_kvmerge.ops.cuda.plan import BYTES_STAGED, merge_bytes, shared_memory
from vllm_kvmerge.ops.types import Destination, HeadPages, Metadata, Rows, SequenceLayers, addresses_on, sent


def merge_entries(
    seq_layers: SequenceLayers, destination: Destination, kept: Tensor, metadata: Metadata, rows: Rows
) -> None:
    """See ``reference.merge_entries``. One launch, where a head's lists fit in a block's shared memory."""
    cache = seq_layers.layers[0]
    device = cache.device
    layouts = {(layer.strides, layer.keys.shape[1:], layer.keys.dtype) for layer in seq_layers.layers}
    num_places = kept.shape[1]
    capacity = max(BYTES_STAGED, 16 * num_places)
    shared_bytes = merge_bytes(capacity, num_places)
    if len(layouts) > 1 or shared_bytes > shared_memory(device):
        backend.fallback(device).merge_entries(seq_layers, destination, kept, metadata, rows)
        return

    def on_device(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return sent(tensor, device).to(dtype).contiguous()

    def table(pages: HeadPages | None) -> Tensor | None:
        return None if pages is None else pages.table_on(device)

    in_pages = isinstance(destination, HeadPages)
    *planes, positions = metadata
    backend.library().merge(
        cache.keys,
        cache.values,
        cache.log_votes,
        addresses_on(device, tuple(layer.addresses for layer in seq_layers.layers)),
        on_device(seq_layers.layer, torch.int64),
        on_device(seq_layers.blocks, torch.int32),
        table(seq_layers.pages),
        None if in_pages else on_device(destination, torch.int32),
        table(destination) if in_pages else None,
        on_device(seq_layers.segments, torch.int64),
        kept.to(torch.int64).contiguous(),
        *(plane.float().contiguous() for plane in planes),
        positions.to(torch.int64).contiguous(),
        rows.places.to(torch.int64).contiguous(),
        *(None if plane is None else plane.float().contiguous() for plane in (rows.keys, rows.values)),
        capacity,
        shared_bytes,
        backend.stream(device),
    )
