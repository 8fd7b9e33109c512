"""The arguments of operators: a layer's paged cache, layers of sequences in it, and batches of queries.

A layer's cache holds, one after the other, for each block and KV head

    K          [head_size, block_size]  cache dtype (of 8 bits: over ``key_scale``), on the CPU: transposed, as vLLM's
                                        CPU operators keep it
               [block_size, head_size]  elsewhere: as FlashAttention reads it
    V          [block_size, head_size]  cache dtype (of 8 bits: over ``value_scale``)

and then, again for each block and KV head,

    log_votes  [block_size]             float32, added to the entry's logit; -inf where the entry is dead
    scores     [block_size]             float32, the statistic that attention accumulates (``ScoreUpdate``)
    aux        [block_size]             float32, the second statistic
    positions  [block_size]             int32, of the newest token merged into the entry; -1 where dead

Metadata lies apart so that K and V are where they would be without it: in between, it would shift them across the pages
of memory at which processors stop reading ahead, which made vLLM's own operator 6% slower. An *interleaved* cache has
the planes of a block and KV head right behind their K and V all the same, because other layers keep something else in
the same memory, a block at a time.

On a GPU, ``keys.permute(0, 3, 1, 2)`` and ``values.transpose(1, 2)`` are the ``[B, bs, H, d]`` that FlashAttention
takes for a paged cache: rows contiguous, strides of blocks, slots and heads as they are.

A page of a *coded* front (``CodedPages``) holds several times as many entries in the same memory.

``log_votes`` and ``positions`` are meaningful only for the entries of a compressed front: an ordinary token has no bias
and its slot is its position, so requests without a policy never write metadata.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vllm_kvmerge.ops.coded import CODINGS, CodedPages, Coding, coding_of, number_of, slots_of

METADATA_BYTES = 16

QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of caches that hold keys and values over a scale, rounded to 8 bits."""

PLANES = ("keys", "values", "log_votes", "scores", "aux", "positions")
"""Of a ``PagedKVCache``."""

PlaneName = Literal["keys", "values"]
ROW_PLANES: tuple[PlaneName, ...] = ("keys", "values")

Metadata = tuple[Tensor, Tensor, Tensor, Tensor]
"""log_votes, scores, aux (``[H, C]`` float32) and positions (``[H, C]`` int64)."""


class ScoreMode(StrEnum):
    """Accumulation of ``scores`` and ``aux`` by attention (see ``ScoreUpdate``)."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    LOG_EMA = "log_ema"

    @property
    def code(self) -> int:
        """The mode's number in tensors."""
        return _CODES[self]


_CODES = {mode: code for code, mode in enumerate(ScoreMode)}


@dataclass(frozen=True)
class ScoreUpdate:
    """Update of the statistics of the entries that attention reads.

    mode ``sum``: ``s <- decay * s + sum over the query heads of p`` for each query in order.
    mode ``mean``: the same, and ``aux`` counts the queries.
    mode ``log_ema``: ``S <- logaddexp(S + ln decay, l + ln(1 - decay))`` with ``l`` the log-mean-exp over the query
    heads of the logits without vote bias (KeepKV eq. 8 in the log domain); ``aux`` counts the queries.
    """

    mode: ScoreMode
    decay: float


NO_UPDATE = ScoreUpdate(ScoreMode.NONE, 1.0)


@dataclass(frozen=True)
class Softmax:
    """How a model makes probabilities of logits, beyond the softmax itself.

    cap: logits become ``cap * tanh(logits / cap)`` (Gemma 2); 0: they stay. Votes are added afterwards: an entry that
    stands for n equal ones weighs n times the exponential of its capped logit.
    sinks: ``[H, G]`` float32, a logit of each query head that counts in the denominator and has no value, so that
    probabilities of entries add up to less than 1 (gpt-oss); None: there are none.
    """

    cap: float = 0.0
    sinks: Tensor | None = None

    def capped(self, logits: Tensor) -> Tensor:
        return logits if self.cap == 0.0 else torch.tanh(logits / self.cap) * self.cap

    def uncapped(self, logits: Tensor) -> Tensor:
        """The inverse of ``capped``; finite up to the cap itself."""
        if self.cap == 0.0:
            return logits
        limit = 1.0 - 2.0**-20
        return torch.atanh((logits / self.cap).clamp(-limit, limit)) * self.cap

    def probabilities(self, logits: Tensor) -> Tensor:
        """``[H, G, q, n]``, of capped logits with votes, -inf where an entry is not seen."""
        if self.sinks is None:
            return logits.softmax(-1)
        sinks = self.sinks[..., None, None].expand(*logits.shape[:3], 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]

    def log_norms(self, logits: Tensor) -> Tensor:
        """``[H, G, q, 1]``: logarithms of the denominators of ``probabilities``."""
        norms = logits.logsumexp(-1, keepdim=True)
        return norms if self.sinks is None else norms.logaddexp(self.sinks[..., None, None])

    def of_heads(self, heads: slice | list[int]) -> "Softmax":
        """That of some of the ``H`` heads."""
        return self if self.sinks is None else Softmax(self.cap, self.sinks[heads])


PLAIN_SOFTMAX = Softmax()


@dataclass(frozen=True)
class Changes:
    """Places for entries, some of them with new keys or values, which operators read as if they were entries.

    origin: ``[H, C]`` int64, the entry that a place holds as it is; negative: none. row: ``[H, C]`` int64, where in
    ``keys`` and ``values`` (``[H, r, d]`` float32) a place's new ones are; negative: nowhere. A plane that is None
    has no new ones, and is the entry's.
    """

    origin: Tensor
    row: Tensor
    keys: Tensor | None
    values: Tensor | None

    def new(self, plane: PlaneName) -> Tensor | None:
        """New rows of ``keys`` or ``values``, if there are any."""
        rows = self.keys if plane == "keys" else self.values
        return rows if rows is not None and rows.shape[1] else None

    def read(self, plane: PlaneName, index: Tensor, unchanged: Callable[[Tensor], Tensor]) -> Tensor:
        """``[H, m, d]``: keys or values of the places at ``index`` (``[H, m]`` int64); zeros where negative.

        unchanged: reads those of entries likewise.
        """
        none, at = index < 0, index.clamp(min=0)
        rows, new = unchanged(self.origin.gather(1, at).masked_fill(none, -1)), self.new(plane)
        if new is None:
            return rows
        row = self.row.gather(1, at).masked_fill(none, -1).unsqueeze(-1)
        return torch.where(row >= 0, new.gather(1, row.clamp(min=0).expand_as(rows)), rows)


@dataclass(frozen=True)
class Rows:
    """Keys and values that a compaction writes.

    places: ``[H, r]`` int64, slots that get a new key or value, none twice; negative: none. keys, values:
    ``[H, r, d]`` float32; None: that plane is written as if there were no rows.
    """

    places: Tensor
    keys: Tensor | None
    values: Tensor | None


@lru_cache(maxsize=64)
def addresses_on(device: torch.device, addresses: tuple[tuple[int, ...], ...]) -> Tensor:
    """``[layers, 6]`` int64 on the device, for kernels; cached, because the same layers recur."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def sent(tensor: Tensor, device: torch.device, out: Tensor | None = None) -> Tensor:
    """Copies a CPU tensor to the device without waiting for the device's earlier work; other tensors are returned.

    From memory that is not pinned the driver copies at most some 64 KiB before it waits. out: a tensor of the device to
    copy to.
    """
    if device.type != "cpu" and tensor.is_cpu:
        tensor = tensor.pin_memory()
        if out is None:
            return tensor.to(device, non_blocking=True)
    return tensor if out is None else out.copy_(tensor, non_blocking=True)


def stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """``rows`` in a cache's dtype: to the nearest, and beyond the largest number of 8 bits to that one."""
    if dtype in QUANTISED and rows.dtype != dtype:
        limit = torch.finfo(dtype).max
        rows = rows.clamp(-limit, limit)
    return rows.to(dtype)


def least_overflow(dtype: torch.dtype) -> float:
    """The least number that rounding to a dtype makes infinite: between its largest and the next, were there one."""
    if dtype == torch.float32:
        return math.inf
    limits = torch.finfo(dtype)
    return limits.max * (2 - limits.eps / 2) / (2 - limits.eps)


def cell_bytes(head_size: int, dtype: torch.dtype) -> int:
    """Bytes of one cell: one token's key, value and metadata for one KV head."""
    return 2 * head_size * dtype.itemsize + METADATA_BYTES


@dataclass(frozen=True)
class PagedKVCache:
    """Views of one layer's cache; ``B`` blocks, ``H`` KV heads, ``bs`` slots per block, ``d`` head size."""

    keys: Tensor  # [B, H, d, bs] cache dtype, either of the last two dimensions contiguous
    values: Tensor  # [B, H, bs, d] cache dtype
    log_votes: Tensor  # [B, H, bs] float32
    scores: Tensor  # [B, H, bs] float32
    aux: Tensor  # [B, H, bs] float32
    positions: Tensor  # [B, H, bs] int32
    key_scale: float = 1.0
    value_scale: float = 1.0

    row_planes: ClassVar[tuple[str, ...]] = ("keys", "values")
    """Planes that together hold the rows of entries, each number once."""

    @classmethod
    def of(
        cls,
        cache: Tensor,
        head_size: int,
        row_major_keys: bool | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        interleaved: bool = False,
        has_metadata: bool = True,
    ) -> "PagedKVCache":
        """Views of ``cache``, contiguous ``[B, H, bs, cell]`` in the cache dtype.

        The shape only gives the size: bytes of a cell are not contiguous. row_major_keys: layout of K, if not the
        device's own. key_scale, value_scale: what numbers of 8 bits are multiplied by; 1 in any other dtype.
        interleaved: all that belongs to a block lies in ``cache[block]``. has_metadata: if not, planes of metadata have
        no slots, and what cells hold beyond a key and a value is unused.
        """
        num_blocks, num_heads, block_size, cell = cache.shape
        num_bytes, wanted = cell * cache.element_size(), cell_bytes(head_size, cache.dtype)
        fits = num_bytes == wanted if has_metadata else wanted - METADATA_BYTES <= num_bytes
        if not fits or not cache.is_contiguous():
            raise ValueError(
                f"cache of shape {tuple(cache.shape)} and {cache.dtype} does not hold "
                f"{wanted} contiguous bytes per cell (head size {head_size})"
            )
        plane = block_size * head_size
        if interleaved:
            regions = cache.view(num_blocks, num_heads, -1)
            keys_and_values, metadata = regions[..., : 2 * plane], regions[..., 2 * plane :]
        else:
            size = num_blocks * num_heads * 2 * plane
            keys_and_values, metadata = cache.view(-1)[:size], cache.view(-1)[size:]
            keys_and_values = keys_and_values.view(num_blocks, num_heads, -1)
            metadata = metadata.view(num_blocks, num_heads, -1)
        keys_and_values = keys_and_values.unflatten(-1, (2, plane))
        if has_metadata:
            metadata = metadata.view(torch.float32).unflatten(-1, (4, block_size))
        else:
            metadata = torch.empty(num_blocks, num_heads, 4, 0, device=cache.device)
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
            key_scale=key_scale,
            value_scale=value_scale,
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
        """A cache that is not allocated yet: only shapes, dtype and device are valid."""
        rows = torch.empty(1, dtype=dtype, device=device).expand(num_blocks, num_kv_heads, block_size, head_size)
        plane = torch.empty(1, device=device).expand(num_blocks, num_kv_heads, block_size)
        return cls(rows.transpose(2, 3), rows, plane, plane, plane, plane)

    @property
    def is_quantised(self) -> bool:
        return self.keys.dtype in QUANTISED

    @property
    def is_interleaved(self) -> bool:
        """Metadata of a block and KV head lie right behind its keys and values."""
        num_bytes = 2 * self.block_size * self.head_size * self.keys.element_size()
        return self.keys.stride(1) * self.keys.element_size() > num_bytes

    def scale_of(self, plane: str) -> float:
        """What numbers in the plane ``keys`` or ``values`` are multiplied by."""
        return self.key_scale if plane == "keys" else self.value_scale

    @property
    def metadata(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The planes of metadata, in the order of ``Metadata``."""
        return self.log_votes, self.scores, self.aux, self.positions

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the planes, in the order of the fields."""
        return tuple(getattr(self, name).data_ptr() for name in PLANES)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides, in elements: K's for block, head, dimension and slot, V's for block, head and slot, those of
        metadata for block and head."""
        return (*self.keys.stride(), *self.values.stride()[:3], *self.log_votes.stride()[:2])

    @cached_property
    def device(self) -> torch.device:
        return self.keys.device

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
    def content(self) -> Tensor:
        """``[B, H, 2 * bs * d]``: keys and values as they lie; quantised ones as uint8."""
        size = 2 * self.block_size * self.head_size
        values = self.values.view(torch.uint8) if self.is_quantised else self.values
        return values.as_strided(
            (*values.shape[:2], size), (*values.stride()[:2], 1), values.storage_offset() - size // 2
        )

    def coded(self, coding: Coding) -> CodedPages:
        """The same memory as pages of coded fronts."""
        return CODINGS[coding].of(self)

    @cached_property
    def by_head(self) -> "PagedKVCache":
        """The same memory as a cache of one KV head: block ``b`` of head ``h`` is its block ``b * H + h``."""
        return replace(self, **{name: getattr(self, name).flatten(0, 1).unsqueeze(1) for name in PLANES})

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole blocks, metadata included; ``sources`` and ``targets``: ``[n]`` int64 ids, none in both."""
        for plane in (self.content, *self.metadata):
            plane.index_copy_(0, targets, plane.index_select(0, sources))

    def poison_blocks(self, ids: Tensor) -> None:
        """Fills whole blocks, metadata included, with bits that are NaN in any floating-point dtype, and position -1.

        ids: ``[n]`` int64."""
        for plane in (self.content, *self.metadata):
            plane.view(torch.uint8).index_fill_(0, ids, 255)

    @cached_property
    def stock_keys(self) -> Tensor:
        """The key plane in the shape and dtype that vLLM's CPU operators ask for, ``[B, H, bs, d]`` (they know it is
        packed), of 8 bits as uint8.

        Raises RuntimeError if keys are not transposed.
        """
        keys = self.keys.view(self.values.shape)
        return keys.view(torch.uint8) if self.is_quantised else keys

    @cached_property
    def stock_values(self) -> Tensor:
        """The value plane as vLLM's CPU operators ask for it."""
        return self.values.view(torch.uint8) if self.is_quantised else self.values


@dataclass(frozen=True)
class HeadPages:
    """Fronts whose KV heads hold different numbers of entries, in pages of their own.

    A page is one KV head's slots of one block in one layer; its id is ``(block * layers + layer) * H + head``. Slot
    ``s`` of a head's front lies in the page ``ids[row, head, s // size]``, whatever layer and head that is of, where
    ``size`` is that of blocks, or of ``CodedPages``.

    layers: the caches of all layers, by whose number ids count. ids: ``[rows, H, pages]`` int64; behind a head's last
    page: any. A row of a batch of attention whose ids are negative has an ordinary front, in its blocks. fronts:
    ``[rows, H]`` int64, entries of each head. coded: ``[rows]`` uint8, how a row's pages are coded (``number_of``);
    None: none are. All on the CPU.
    """

    layers: Sequence[PagedKVCache]
    ids: Tensor
    fronts: Tensor
    coded: Tensor | None = None
    _sent: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def even(cls, num_layers: int, layer: int, num_kv_heads: int, blocks: Tensor) -> Tensor:
        """``[H, blocks]`` int64: ids of the pages of an ordinary front of one layer; ``blocks``: ``[blocks]``."""
        return (blocks.long() * num_layers + layer) * num_kv_heads + torch.arange(num_kv_heads).unsqueeze(1)

    @property
    def num_kv_heads(self) -> int:
        return self.ids.shape[1]

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Layer, block and KV head of pages, each of the shape of ``ids``."""
        lane = ids // self.num_kv_heads
        return lane % len(self.layers), lane // len(self.layers), ids % self.num_kv_heads

    def __getitem__(self, rows: slice) -> "HeadPages":
        """The pages of some rows."""
        return HeadPages(
            self.layers, self.ids[rows], self.fronts[rows], None if self.coded is None else self.coded[rows]
        )

    def coding(self, row: int) -> Coding | None:
        """How a row's pages are coded; None: they are not."""
        return None if self.coded is None else coding_of(int(self.coded[row]))

    def page_size(self, row: int) -> int:
        """Slots of a row's pages."""
        return self.layers[0].block_size * slots_of(self.coding(row))

    def of_heads(self, mask: Tensor) -> "HeadPages":
        """The same with no entries in heads outside ``mask`` (``[rows, H]`` bool), so that nothing is written there."""
        return HeadPages(self.layers, self.ids, self.fronts * mask, self.coded)

    @property
    def by_head(self) -> "HeadPages":
        """The same as pages of ``PagedKVCache.by_head``: a row for each head of a row."""
        layer, block, head = self.places(self.ids)
        ids = (block * self.num_kv_heads + head) * len(self.layers) + layer
        layers = [cache.by_head for cache in self.layers]
        return HeadPages(layers, ids.flatten(0, 1).unsqueeze(1), self.fronts.flatten().unsqueeze(1))

    def table(self) -> Tensor:
        """``[1 + rows * H * (1 + pages) + 1]`` int32 on the CPU: the number of pages that each head's list has room
        for; for each row and head, its number of entries and its list; and how the pages of all rows are coded
        (``number_of``)."""
        lists = torch.cat([self.fronts.unsqueeze(2), self.ids], 2).flatten()
        return torch.cat([torch.tensor([self.ids.shape[2]]), lists, torch.tensor([number_of(self.coding(0))])]).int()

    def table_on(self, device: torch.device) -> Tensor:
        """``table`` on a device, where it is sent once."""
        if device not in self._sent:
            self._sent[device] = sent(self.table(), device)
        return self._sent[device]


@dataclass(frozen=True)
class SequenceLayers:
    """Layers of sequences that operators process together; all have equally many live entries.

    The live entries of a sequence layer, one layer of one sequence, are its slots ``[0, front)`` and
    ``[tail, seq_len)``, in this order. Operators take and return ``[H, ...]``, where ``H`` counts the KV heads of all
    sequence layers, one sequence layer's after the other's.

    layers: the caches of the layers. layer: ``[U]`` int64, index in ``layers`` of each sequence layer. blocks:
    ``[U, blocks]``, ids of its blocks. segments: ``[U, 3]`` int64, front, tail and seq_len. ``layer`` and ``segments``
    had better be on the CPU, so that reading them does not wait for a GPU. pages: of the fronts, ``U`` rows, if heads
    have their own; a head's entries from ``pages.fronts`` up to ``front`` are dead then, and take no room.
    """

    layers: Sequence[PagedKVCache]
    layer: Tensor
    blocks: Tensor
    segments: Tensor
    pages: HeadPages | None = None

    @classmethod
    def of(cls, cache: PagedKVCache, blocks: Tensor, front: int, tail: int, seq_len: int) -> "SequenceLayers":
        """One layer of one sequence; ``blocks``: ``[blocks]``."""
        return cls((cache,), torch.zeros(1, dtype=torch.int64), blocks[None], torch.tensor([[front, tail, seq_len]]))

    def of_heads(self, rows: list[int]) -> "SequenceLayers":
        """Some of the ``H`` heads, each as a sequence layer of its own."""
        num_heads, chosen = self.layers[0].num_kv_heads, torch.tensor(rows, device="cpu")
        unit, head = chosen // num_heads, chosen % num_heads
        blocks = self.blocks[sent(unit, self.blocks.device)] * num_heads
        pages = None
        if self.pages is not None:
            by_head = self.pages.by_head
            pages = HeadPages(by_head.layers, by_head.ids[chosen], by_head.fronts[chosen])
        return SequenceLayers(
            [cache.by_head for cache in self.layers],
            self.layer[unit],
            blocks + sent(head, blocks.device).unsqueeze(1),
            self.segments[unit],
            pages,
        )

    def __iter__(self) -> Iterator[tuple[PagedKVCache, Tensor, int, int, int]]:
        """Yields each sequence layer's cache, blocks, front, tail and seq_len."""
        for layer, blocks, bounds in zip(self.layer.tolist(), self.blocks, self.segments.tolist(), strict=True):
            yield self.layers[layer], blocks, *bounds

    @cached_property
    def num_entries(self) -> int:
        """Live entries of each sequence layer."""
        front, tail, seq_len = self.segments[0].tolist()
        return int(front + seq_len - tail)

    @property
    def num_heads(self) -> int:
        """``H``: KV heads of all sequence layers together."""
        return self.layer.shape[0] * self.layers[0].num_kv_heads

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    @property
    def head_size(self) -> int:
        return self.layers[0].head_size

    def scales(self, plane: str) -> Tensor | None:
        """``[H, 1, 1]`` float32: of the heads' keys or values; None: all are 1."""
        if all(layer.scale_of(plane) == 1.0 for layer in self.layers):
            return None
        scales = [self.layers[layer].scale_of(plane) for layer in self.layer.tolist()]
        by_layer = sent(torch.tensor(scales), self.device)
        return by_layer.repeat_interleave(self.layers[0].num_kv_heads)[:, None, None]


@dataclass(frozen=True)
class PageTables:
    """Head pages of the rows of a batch of attention, as kernels on a GPU find them: each request's lie in a table of
    its own, wherever that is, so that captured graphs hold for fronts of all shapes.

    layers: the caches of all layers, by whose number ids count. layer: number of the one that attends. addresses:
    ``[rows]`` int64 on the device, of each request's ``HeadPages.table``, with a row for each layer, on the device;
    0: an ordinary front, in the row's blocks. coded: whether there may be coded pages among them, which are in 8 bits.
    """

    layers: Sequence[PagedKVCache]
    layer: int
    addresses: Tensor
    coded: bool = False


Destination = Tensor | HeadPages
"""Where compactions write: ``[U, blocks]``, block ids of each sequence layer, or pages of its heads."""


@dataclass(frozen=True)
class AttentionBatch:
    """The rows of one call of attention: sequences, and the newest tokens of each, whose queries attend.

    Row ``r`` owns the tokens ``query_starts[r] : query_starts[r] + query_lens[r]`` of the queries and of the output;
    their keys and values are in the cache already. Operators on a GPU skip a row without queries.

    block_table: ``[rows, max_blocks]`` integers, block ids. query_starts, query_lens, seq_lens, fronts, tails:
    ``[rows]`` integers; a sequence that was never compressed has front and tail 0. score_modes: ``[rows]`` integers,
    codes of ``ScoreMode``. score_decays: ``[rows]`` float32 (see ``ScoreUpdate``). max_query_len: at least the largest
    of ``query_lens``; None: operators on a GPU wait for the GPU to read it. pages: of the rows' fronts, where heads
    have their own, for which ``fronts`` is not read. tables: the same for operators on a GPU, which read only
    these, as the others read only ``pages``. shared: what operators have computed from the rows' numbers, for calls for
    other layers; the same in batches that ``replace`` makes of this one.
    """

    block_table: Tensor
    query_starts: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    fronts: Tensor
    tails: Tensor
    score_modes: Tensor
    score_decays: Tensor
    max_query_len: int | None = None
    pages: HeadPages | None = None
    tables: PageTables | None = None
    shared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def single(
        cls,
        blocks: Tensor,
        num_queries: int,
        seq_len: int,
        front: int = 0,
        tail: int = 0,
        update: ScoreUpdate = NO_UPDATE,
    ) -> "AttentionBatch":
        """A batch of one sequence; ``blocks``: ``[blocks]``."""
        numbers = (0, num_queries, seq_len, front, tail, update.mode.code)
        row = _one_row(blocks.device, numbers, update.decay)
        return cls(blocks[None], *row, num_queries)  # type: ignore[call-arg]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields that are tensors, in their order."""
        return (
            self.block_table, self.query_starts, self.query_lens, self.seq_lens,
            self.fronts, self.tails, self.score_modes, self.score_decays,
        )  # fmt: skip

    def map(self, change: Callable[[Tensor], Tensor], max_query_len: int | None) -> "AttentionBatch":
        """The batch with ``change`` applied to each tensor; without ``pages``."""
        tables = self.tables and replace(self.tables, addresses=change(self.tables.addresses))
        return AttentionBatch(*map(change, self.tensors), max_query_len, None, tables)  # type: ignore[call-arg, misc]

    def __len__(self) -> int:
        return self.query_lens.shape[0]


@lru_cache(maxsize=64)
def _one_row(device: torch.device, numbers: tuple[int, ...], decay: float) -> tuple[Tensor, ...]:
    """The numbers of one sequence, ``[1]`` each; cached, because all layers of a step use the same."""
    integers = torch.tensor(numbers, dtype=torch.int32).unsqueeze(1)
    return *sent(integers, device).unbind(), sent(torch.tensor([decay]), device)
