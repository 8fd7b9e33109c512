"""Coded fronts: fronts whose keys and values are stored in fewer bits, and how pages hold them.

Such a front is written once, whole pages at a time, and afterwards only attended to. So its pages need no scores and
positions, and in the memory of one slot of the cache they have several (``CodedPages.slots``).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

Coding = Literal["int8", "int4"]

LARGEST_CODE = 127

GROUP = 32
"""Numbers that share a range in 4 bits."""


class Cells(Protocol):
    """What pages take of a layer's cache (``PagedKVCache``)."""

    @property
    def keys(self) -> Tensor: ...
    @property
    def content(self) -> Tensor: ...
    @property
    def log_votes(self) -> Tensor: ...
    @property
    def block_size(self) -> int: ...
    @property
    def head_size(self) -> int: ...


@dataclass(frozen=True)
class CodedPages(ABC):
    """The memory of a layer's pages as those of coded fronts; ``n`` slots."""

    slots: ClassVar[int]
    """In place of one of the cache's, whose numbers have 16 bits or more."""
    least_head_size: ClassVar[int] = 1

    log_votes: Tensor  # [B, H, n] float32

    @classmethod
    @abstractmethod
    def of(cls, cache: Cells) -> "CodedPages":
        """The cache's pages."""

    @staticmethod
    @abstractmethod
    def encode(keys: Tensor, values: Tensor, live: Tensor) -> dict[str, Tensor]:
        """What the planes hold of pages: ``keys`` and ``values``, ``[p, n, d]`` float32, finite; ``live``: ``[p, n]``
        bool, the slots that are read."""

    @staticmethod
    @abstractmethod
    def decode(planes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The keys and values that ``encode``'s planes stand for."""

    def write(self, block: Tensor, head: Tensor, keys: Tensor, values: Tensor, log_votes: Tensor) -> None:
        """Fills pages, by their block and head (``[p]``). log_votes: ``[p, n]``, -inf where nothing is read."""
        planes = self.encode(keys, values, log_votes > -torch.inf)
        for name, plane in (planes | {"log_votes": log_votes}).items():
            getattr(self, name)[block, head] = plane

    def read(self, block: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (``[p, n, d]`` float32) and log_votes of pages."""
        planes = {name: plane[block, head] for name, plane in vars(self).items()}
        return *self.decode(planes), planes["log_votes"]

    @classmethod
    def _votes(cls, cache: Cells) -> tuple[Tensor, Tensor]:
        """Those of the slots, and the rest of the metadata's words, ``[B, H, ...]`` float32."""
        votes, size = cache.log_votes, cls.slots * cache.block_size
        words = votes.as_strided((*votes.shape[:2], 4 * cache.block_size), votes.stride(), votes.storage_offset())
        return words[..., :size], words[..., size:]


@dataclass(frozen=True)
class Int8Pages(CodedPages):
    """Whole numbers from -127 to 127 times a scale of each key and value. In 16 bits they fill the cache's memory."""

    slots = 2

    keys: Tensor  # [B, H, d, n] int8, either of the last two dimensions contiguous, as in the cache
    values: Tensor  # [B, H, n, d] int8
    key_scales: Tensor  # [B, H, n] float16
    value_scales: Tensor  # [B, H, n] float16

    @classmethod
    def of(cls, cache: Cells) -> "Int8Pages":
        votes, rest = cls._votes(cache)
        size, head_size = votes.shape[2], cache.head_size
        codes = cache.content.view(torch.int8)[..., : 2 * size * head_size].unflatten(-1, (2, -1))
        scales = rest.view(torch.float16).unflatten(-1, (2, size))
        keys = codes[:, :, 0]
        transposed = cache.keys.stride(3) == 1
        return cls(
            log_votes=votes,
            keys=keys.unflatten(-1, (head_size, size))
            if transposed
            else keys.unflatten(-1, (size, head_size)).transpose(2, 3),
            values=codes[:, :, 1].unflatten(-1, (size, head_size)),
            key_scales=scales[:, :, 0],
            value_scales=scales[:, :, 1],
        )

    @staticmethod
    def encode(keys: Tensor, values: Tensor, live: Tensor) -> dict[str, Tensor]:
        (key_codes, key_scales), (value_codes, value_scales) = scaled(keys), scaled(values)
        scales = {"key_scales": key_scales, "value_scales": value_scales}
        return {"keys": key_codes.mT, "values": value_codes} | scales

    @staticmethod
    def decode(planes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        key_scales, value_scales = (planes[name].float().unsqueeze(-1) for name in ("key_scales", "value_scales"))
        return planes["keys"].mT * key_scales, planes["values"] * value_scales


@dataclass(frozen=True)
class Int4Pages(CodedPages):
    """Whole numbers from 0 to 15, times a scale, plus an offset, which ``GROUP`` neighbours in memory share: numbers
    of a channel in so many keys, and so many channels of a value. Keys are transposed, wherever the cache is."""

    slots = 3
    least_head_size = 32  # smaller ones leave too little room for the ranges

    keys: Tensor  # [B, H, d, n / 2] uint8, the even slot in the lower 4 bits
    values: Tensor  # [B, H, n, d / 2] uint8, likewise
    key_ranges: Tensor  # [B, H, n / GROUP, 2, d] float16, scales and offsets
    value_ranges: Tensor  # [B, H, d / GROUP, 2, n] float16

    @classmethod
    def of(cls, cache: Cells) -> "Int4Pages":
        votes, _ = cls._votes(cache)
        size, head_size = votes.shape[2], cache.head_size
        rest, planes = cache.content.view(torch.uint8), []
        for rows, row_bytes in (
            (head_size, size // 2),
            (size, head_size // 2),
            (-(-size // GROUP), 4 * head_size),
            (-(-head_size // GROUP), 4 * size),
        ):
            planes.append(rest[..., : rows * row_bytes].unflatten(-1, (rows, row_bytes)))
            rest = rest[..., rows * row_bytes :]
        keys, values, *ranges = planes
        return cls(votes, keys, values, *(one.view(torch.float16).unflatten(-1, (2, -1)) for one in ranges))

    @staticmethod
    def encode(keys: Tensor, values: Tensor, live: Tensor) -> dict[str, Tensor]:
        live = live.unsqueeze(-1)
        (key_codes, key_ranges), (value_codes, value_ranges) = ranged(keys.mT, live.mT), ranged(values, live)
        ranges = {"key_ranges": key_ranges, "value_ranges": value_ranges}
        return {"keys": key_codes, "values": value_codes} | ranges

    @staticmethod
    def decode(planes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        keys = unranged(planes["keys"], planes["key_ranges"])
        return keys.mT, unranged(planes["values"], planes["value_ranges"])


CODINGS: dict[Coding, type[CodedPages]] = {"int8": Int8Pages, "int4": Int4Pages}
"""By the name that requests give."""


def number_of(coding: Coding | None) -> int:
    """What stands for a coding in tensors; 0: for none."""
    return 0 if coding is None else 1 + list(CODINGS).index(coding)


def coding_of(number: int) -> Coding | None:
    """The inverse of ``number_of``."""
    return [None, *CODINGS][number]


def slots_of(coding: Coding | None) -> int:
    """Slots in the memory of one of the cache's."""
    return 1 if coding is None else CODINGS[coding].slots


def scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales, ``[..., d]`` int8 and ``[...]`` float16, of ``rows`` (``[..., d]`` float32, finite)."""
    limits = torch.finfo(torch.float16)
    scales = (rows.abs().amax(-1) / LARGEST_CODE).clamp(limits.smallest_normal, limits.max).half()
    codes = (rows / scales.unsqueeze(-1)).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8), scales


def ranged(rows: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 4 bits in pairs, and ranges, ``[p, r, d / 2]`` uint8 and ``[p, d / GROUP, 2, r]`` float16, of ``rows``
    (``[p, r, d]`` float32, finite), as far as they are ``live``; the last group may be shorter."""
    limits, length = torch.finfo(torch.float16), rows.shape[-1]
    beyond = 0, -length % GROUP
    groups = torch.nn.functional.pad(rows, beyond).unflatten(-1, (-1, GROUP))
    dead = ~torch.nn.functional.pad(live.expand_as(rows), beyond).unflatten(-1, (-1, GROUP))
    low, high = groups.masked_fill(dead, torch.inf).amin(-1), groups.masked_fill(dead, -torch.inf).amax(-1)
    low, high = (end.nan_to_num(0.0, 0.0, 0.0).clamp(limits.min, limits.max) for end in (low, high))
    scales = ((high - low) / 15).clamp(min=limits.smallest_normal)
    ranges = torch.stack([scales, low], -1).half()  # [p, r, d / GROUP, 2]
    scales, low = ranges.float().unsqueeze(-2).unbind(-1)
    codes = groups.sub(low).div_(scales).round_().clamp_(0, 15).to(torch.uint8).flatten(-2)[..., :length]
    return codes[..., ::2] | codes[..., 1::2] << 4, ranges.permute(0, 2, 3, 1)


def unranged(codes: Tensor, ranges: Tensor) -> Tensor:
    """``[p, r, d]`` float32, what ``ranged`` stands for."""
    numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    by_number = ranges.permute(2, 0, 3, 1).float().repeat_interleave(GROUP, -1)
    scales, low = by_number[..., : numbers.shape[-1]]
    return numbers * scales + low
