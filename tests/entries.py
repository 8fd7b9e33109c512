"""Live entries of one layer of one sequence as tensors, read from its cache and written to it."""

from torch import Tensor

from vllm_kvmerge.ops import PagedKVCache, SequenceLayers, reference
from vllm_kvmerge.policies import Entries


def gather_entries(cache: PagedKVCache, blocks: Tensor, front: int, tail: int, seq_len: int) -> Entries:
    """Float32 copies; statistics as attention left them in the cache. ``blocks``: ``[blocks]``."""
    seq_layers = SequenceLayers.of(cache, blocks, front, tail, seq_len)
    index = _all(seq_layers.num_heads, seq_layers.num_entries, blocks)
    keys, values = (reference.gather_rows(seq_layers, plane, index) for plane in ("keys", "values"))
    return Entries(keys, values, *reference.gather_metadata(seq_layers))


def write_front(cache: PagedKVCache, blocks: Tensor, entries: Entries) -> None:
    """Writes entries to slots ``[0, len(entries))`` of ``blocks``; other slots of the last block stay as they are."""
    seq_layers = SequenceLayers.of(cache, blocks, 0, 0, len(entries))
    places = _all(seq_layers.num_heads, len(entries), blocks)
    reference.write_rows(seq_layers, blocks[None], places, entries.keys, entries.values)
    reference.write_metadata(
        seq_layers, blocks[None], entries.log_votes, entries.scores, entries.aux, entries.positions
    )


def _all(num_heads: int, num_entries: int, like: Tensor) -> Tensor:
    return like.new_tensor(range(num_entries)).long().repeat(num_heads, 1)
