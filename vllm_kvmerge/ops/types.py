"""Layout of KV pages: the planes of each (block, head), and which of them a sequence lies in.

A layer's cache holds, one after the other, for each block and head

    K          [head_size, block_size]  cache dtype, on the CPU: transposed, as vLLM's CPU operators keep it
               [block_size, head_size]  elsewhere: as FlashAttention reads it
    V          [block_size, head_size]  cache dtype

and then, again for each block and head,

    log_votes  [block_size]             float32, added to the entry's logit; -inf where the entry is dead
    scores     [block_size]             float32, the tracker's statistic
    aux        [block_size]             float32, a second statistic
    positions  [block_size]             int32, of the newest token merged into the entry; -1 where dead

Metadata lies apart so that K and V are where they would be without it: between them it would put them across the
pages of memory at which processors stop reading ahead, which made vLLM's own operator 6% slower.

On a GPU, ``keys.permute(0, 3, 1, 2)`` and ``values.transpose(1, 2)`` are the ``[B, bs, H, d]`` that FlashAttention
takes for a paged cache: rows contiguous, strides of blocks, slots and heads as they are.

``log_votes`` and ``positions`` are meaningful only for the entries of a compressed front: an ordinary token has no bias
and its slot is its position, so requests without a policy never write metadata.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property, lru_cache

import torch
from torch import Tensor

METADATA_BYTES = 16

Metadata = tuple[Tensor, Tensor, Tensor, Tensor]
"""log_votes, scores, aux (``[H, C]`` float32) and positions (``[H, C]`` int64)."""


class ScoreMode(StrEnum):
    """What attention accumulates in ``scores`` and ``aux`` (see ``ScoreUpdate``)."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    LOG_EMA = "log_ema"

    @property
    def code(self) -> int:
        """The mode's number, where modes are passed as a tensor."""
        return list(ScoreMode).index(self)


@dataclass(frozen=True)
class ScoreUpdate:
    """How attention updates the statistics of the entries it reads.

    mode ``sum``: ``s <- decay * s + sum over the query heads of p`` for each query in order.
    mode ``mean``: the same, and ``aux`` counts the queries.
    mode ``log_ema``: ``S <- logaddexp(S + ln decay, l + ln(1 - decay))`` with ``l`` the log-mean-exp over the query
    heads of the logits without vote bias (KeepKV eq. 8 in the log domain); ``aux`` counts the queries.
    """

    mode: ScoreMode
    decay: float


@dataclass(frozen=True)
class Rows:
    """Keys and values that a compaction writes. places: ``[H, r]`` int64, slots that get a new key or value, none twice;
    negative: none. keys, values: ``[H, r, d]`` float32; None: that plane is written as if there were no rows."""

    places: Tensor
    keys: Tensor | None
    values: Tensor | None


@lru_cache(maxsize=64)
def addresses_on(device: torch.device, addresses: tuple[tuple[int, ...], ...]) -> Tensor:
    """``[layers, 6]`` int64 on the device, for kernels; the same layers are asked for again and again."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU's on the device, without waiting for what that does until then; others as they are.

    From memory that is not pinned the driver copies no more than some 64 KiB before it waits.
    """
    if device.type == "cpu" or not tensor.is_cpu:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def cell_bytes(head_size: int, dtype: torch.dtype) -> int:
    """Bytes of one cell: one token's key, value and metadata for one KV head."""
    return 2 * head_size * dtype.itemsize + METADATA_BYTES


@dataclass(frozen=True)
class PagedKVCache:
    """Views of one layer's cache; ``B`` blocks, ``H`` KV heads, ``bs`` slots per block, ``d`` head size."""

    keys: Tensor  # [B, H, d, bs] cache dtype, whichever of the last two lies together
    values: Tensor  # [B, H, bs, d] cache dtype
    log_votes: Tensor  # [B, H, bs] float32
    scores: Tensor  # [B, H, bs] float32
    aux: Tensor  # [B, H, bs] float32
    positions: Tensor  # [B, H, bs] int32

    @classmethod
    def of(cls, cache: Tensor, head_size: int, row_major_keys: bool | None = None) -> "PagedKVCache":
        """Views of ``cache``, contiguous ``[B, H, bs, cell]`` in the cache dtype.

        That shape only says how large it is: bytes of a cell do not lie together. row_major_keys: the layout of K, if
        not the device's own.
        """
        num_blocks, num_heads, block_size, cell = cache.shape
        if cell * cache.element_size() != cell_bytes(head_size, cache.dtype) or not cache.is_contiguous():
            raise ValueError(
                f"cache of shape {tuple(cache.shape)} and {cache.dtype} does not hold "
                f"{cell_bytes(head_size, cache.dtype)} contiguous bytes per cell (head size {head_size})"
            )
        plane = block_size * head_size
        size = num_blocks * num_heads * 2 * plane
        keys_and_values = cache.view(-1)[:size].view(num_blocks, num_heads, 2, plane)
        metadata = cache.view(-1)[size:].view(torch.float32).view(num_blocks, num_heads, 4, block_size)
        keys = keys_and_values[:, :, 0]
        if row_major_keys is None:
            row_major_keys = not cache.is_cpu
        return cls(
            keys=keys.unflatten(-1, (block_size, head_size)).transpose(2, 3)
            if row_major_keys
            else keys.unflatten(-1, (head_size, block_size)),
            values=keys_and_values[:, :, 1].unflatten(-1, (block_size, head_size)),
            log_votes=metadata[:, :, 0],
            scores=metadata[:, :, 1],
            aux=metadata[:, :, 2],
            positions=metadata[:, :, 3].view(torch.int32),
        )

    @classmethod
    def planned(
        cls,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "PagedKVCache":
        """PagedKVCache that are not there yet: only their shapes, dtype and device are to be asked for."""
        rows = torch.empty(1, dtype=dtype, device=device).expand(num_blocks, num_kv_heads, block_size, head_size)
        plane = torch.empty(1, device=device).expand(num_blocks, num_kv_heads, block_size)
        return cls(rows.transpose(2, 3), rows, plane, plane, plane, plane)

    @cached_property
    def native_obstacle(self) -> str | None:
        """Why the native operators cannot work on these pages; None if they can."""
        if self.keys.device.type != "cpu":
            return f"the cache is on {self.keys.device}"
        if self.keys.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the cache is {self.keys.dtype}"
        if self.head_size % 16 or not 32 <= self.head_size <= 256:
            return f"head size {self.head_size} is not a multiple of 16 from 32 to 256"
        if self.block_size % 16:
            return f"block size {self.block_size} is not a multiple of 16"
        if self.keys.stride(3) != 1:
            return "keys are not transposed"
        first = self.keys.data_ptr()
        plane_bytes = self.block_size * self.head_size * self.keys.element_size()
        metadata = first + self.keys.shape[0] * self.num_kv_heads * 2 * plane_bytes
        expected = [first, first + plane_bytes, *(metadata + i * 4 * self.block_size for i in range(4))]
        for field, address in zip(fields(self), expected, strict=True):
            if getattr(self, field.name).data_ptr() != address:
                return f"the plane of {field.name} is not where it should be"
        return None

    @cached_property
    def triton_obstacle(self) -> str | None:
        """Why Triton's operators cannot work on these pages; None if they can. The device is not looked at."""
        if self.keys.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the cache is {self.keys.dtype}"
        if not 16 <= self.head_size <= 256:
            return f"head size {self.head_size} is not from 16 to 256"
        if self.values.stride(3) != 1:
            return "values do not lie together"
        metadata = (self.log_votes, self.scores, self.aux, self.positions)
        if len({plane.stride() for plane in metadata}) != 1 or self.log_votes.stride(2) != 1:
            return "metadata planes differ in layout"
        if any(address % 16 for address in self.addresses):
            return "planes are not aligned to 16 bytes"
        return None

    @cached_property
    def cuda_obstacle(self) -> str | None:
        """Why the CUDA operators cannot work on these pages; None if they can. The device is not looked at."""
        if self.triton_obstacle is not None:
            return self.triton_obstacle
        if self.keys.stride(2) != 1 or self.keys.transpose(2, 3).stride() != self.values.stride():
            return "keys do not lie row by row"
        item = self.keys.element_size()
        if any(stride * item % 16 for stride in (*self.values.stride()[:3], self.head_size)):
            return "rows do not begin at multiples of 16 bytes"
        return None

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Of the planes, in the order of the fields."""
        return tuple(getattr(self, field.name).data_ptr() for field in fields(self))

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Of K for block, head, dimension and slot; of V for block, head and slot; of metadata for block and head."""
        return (*self.keys.stride(), *self.values.stride()[:3], *self.log_votes.stride()[:2])

    @property
    def block_size(self) -> int:
        return self.values.shape[2]

    @property
    def head_size(self) -> int:
        return self.values.shape[3]

    @property
    def num_kv_heads(self) -> int:
        return self.values.shape[1]

    @cached_property
    def stock_keys(self) -> Tensor:
        """The key plane in the shape that vLLM's CPU operators ask for, ``[B, H, bs, d]`` (they know it is packed).

        Raises RuntimeError where keys are not transposed.
        """
        return self.keys.view(self.values.shape)


@dataclass(frozen=True)
class SequenceLayers:
    """Layers of sequences, one after the other: what operators work on together; all have equally many entries.

    A unit is one layer of one sequence. Its live entries are its slots ``[0, front)`` and ``[tail, seq_len)``, in this
    order. What operators take and give is ``[H, ...]`` with the heads of all units, a unit's one after the other.

    layers: pages of the layers that units lie in. layer: ``[U]`` int64, which of these. blocks: ``[U, blocks]``, ids of
    each unit's blocks. segments: ``[U, 3]`` int64, front, tail and seq_len. On a GPU, ``layer`` and ``segments`` are
    better on the CPU, where their numbers are known without waiting for the GPU.
    """

    layers: Sequence[PagedKVCache]
    layer: Tensor
    blocks: Tensor
    segments: Tensor

    @classmethod
    def of(cls, pages: PagedKVCache, blocks: Tensor, front: int, tail: int, seq_len: int) -> "SequenceLayers":
        """One layer of one sequence; ``blocks``: ``[blocks]``."""
        return cls((pages,), torch.zeros(1, dtype=torch.int64), blocks[None], torch.tensor([[front, tail, seq_len]]))

    def __iter__(self) -> Iterator[tuple[PagedKVCache, Tensor, int, int, int]]:
        """Of each unit its layer's pages, its blocks, front, tail and seq_len."""
        for layer, blocks, bounds in zip(self.layer.tolist(), self.blocks, self.segments.tolist(), strict=True):
            yield self.layers[layer], blocks, *bounds

    @cached_property
    def num_entries(self) -> int:
        """Live entries of each unit."""
        front, tail, seq_len = self.segments[0].tolist()
        return int(front + seq_len - tail)

    @property
    def num_heads(self) -> int:
        """Of all units together, ``H``."""
        return len(self.layer) * self.layers[0].num_kv_heads

    @property
    def native_obstacle(self) -> str | None:
        """Why the native operators cannot work on these pages; None if they can."""
        return next((pages.native_obstacle for pages in self.layers if pages.native_obstacle), None)

    @property
    def triton_obstacle(self) -> str | None:
        """Why Triton's operators cannot work on these pages; None if they can."""
        return next((pages.triton_obstacle for pages in self.layers if pages.triton_obstacle), None)

    @property
    def cuda_obstacle(self) -> str | None:
        """Why the CUDA operators cannot work on these pages; None if they can."""
        return next((pages.cuda_obstacle for pages in self.layers if pages.cuda_obstacle), None)
