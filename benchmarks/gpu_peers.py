"""What else computes attention on a GPU, for gpu_operators.py: PyTorch, FlashAttention and FlexAttention.

Each is given the same keys, values and queries. Those without a vote bias are compared with attention without one.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from gpu_bench import Caches, expected_attention, gather_entries, relative_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from vllm_kvmerge.ops import reference

FLEX_QUERY_BLOCK = 128
"""Queries of a row of FlexAttention's block mask."""

PAGE_SIZES = (16, 128)
"""Of FlexAttention over pages: as our blocks are, and the size of block that it has by itself."""


@dataclass
class Problem:
    """``num_queries`` newest queries of each sequence, ``[rows * num_queries, H * G, d]``, and what they should see."""

    caches: Caches
    query: Tensor
    num_queries: int
    scale: float

    @cached_property
    def gathered(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each copy, ``[rows, H, n, d]``, contiguous."""
        caches, copies = self.caches, []
        for pages in caches.layers:
            blocks = caches.table.flatten()
            found = gather_entries(pages, blocks, 0, 0, len(blocks) * pages.block_size)
            planes = (
                plane.to(caches.bench.dtype).unflatten(1, (caches.rows, -1))[:, :, : caches.entries].transpose(0, 1)
                for plane in (found.keys, found.values)
            )
            key, value = (plane.contiguous() for plane in planes)
            copies.append((key, value))
        return copies

    @cached_property
    def votes(self) -> Tensor:
        """``[rows, H, n]`` of the first copy; every entry has one. The others are given the same."""
        caches = self.caches
        return reference.gather_metadata(caches.seq_layers(0, caches.entries))[0].view(caches.rows, -1, caches.entries)

    @cached_property
    def by_head(self) -> Tensor:
        """Queries as ``[rows, H * G, q, d]``."""
        return self.query.unflatten(0, (-1, self.num_queries)).transpose(1, 2)

    @property
    def groups(self) -> int:
        return self.query.shape[1] // self.caches.bench.heads

    def error(self, output: Tensor, biased: bool) -> float:
        """Of the first and the last sequence; output: ``[rows, H * G, q, d]`` for the first copy."""
        caches, found = self.caches, []
        for row in sorted({0, caches.rows - 1}):
            front = caches.entries if biased else 0
            entries = gather_entries(caches.pages(0), caches.table[row], front, front, caches.entries)
            tokens = slice(row * self.num_queries, (row + 1) * self.num_queries)
            expected, _ = expected_attention(self.query[tokens], entries, self.scale, None)
            found.append(relative_error(output[row].transpose(0, 1), expected))
        return max(found)


Run = Callable[[int], Tensor]


@dataclass
class Peer:
    """biased: whether it adds votes. make: gets ready; what that returns runs on a copy of the cache. Both may raise
    whatever there is to say why this does not work here."""

    name: str
    biased: bool
    make: Callable[[Problem], Run]


@dataclass
class Timed:
    """seconds: of a call; error: of its output. reason: why there is neither."""

    name: str
    biased: bool
    seconds: float = 0.0
    error: float = 0.0
    reason: str = ""


def timed(peers: list[Peer], problem: Problem) -> Iterator[Timed]:
    """Each peer's time, after its output for the first copy has been compared with float64."""
    bench = problem.caches.bench
    for peer in peers:
        found = Timed(peer.name, peer.biased)
        try:
            run = peer.make(problem)
            found.error = problem.error(run(0), peer.biased)
            found.seconds = bench.time(run, problem.caches.copies)
        except Exception as error:
            if "CUDA error" in str(error):  # nothing after that works
                raise
            found.reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        yield found


def all_peers() -> list[Peer]:
    peers = [
        Peer("SDPA", False, lambda problem: _sdpa(problem, None)),
        Peer("SDPA flash", False, lambda problem: _sdpa(problem, SDPBackend.FLASH_ATTENTION)),
        Peer("flash_attn", False, _flash_attn),
    ]
    for size in PAGE_SIZES:
        peers.append(Peer(f"Flex, pages of {size}", True, lambda problem, size=size: flex(problem, size)))
    return peers


def _sdpa(problem: Problem, backend: Any) -> Run:
    if backend is not None and not problem.caches.bench.is_gpu:
        raise RuntimeError("that is for GPUs")
    mask = causal_lower_right(problem.num_queries, problem.caches.entries) if problem.num_queries > 1 else None

    def run(number: int) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            key, value = problem.gathered[number % len(problem.gathered)]
            return scaled_dot_product_attention(
                problem.by_head, key, value, attn_mask=mask, scale=problem.scale, enable_gqa=problem.groups > 1
            )

    return run


def _flash_attn(problem: Problem) -> Run:
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        from flash_attn import flash_attn_with_kvcache

    query = problem.query.unflatten(0, (-1, problem.num_queries))

    def run(number: int) -> Tensor:
        key, value = (plane.transpose(1, 2) for plane in problem.gathered[number % len(problem.gathered)])
        output = flash_attn_with_kvcache(query, key, value, softmax_scale=problem.scale, causal=True)
        return (output[0] if isinstance(output, tuple) else output).transpose(1, 2)

    return run


@dataclass
class PagedPlanes:
    """Keys and values in pages of ``size`` slots in one sequence of slots, as FlexAttention takes them.

    table: ``[rows, pages]`` int64, each sequence's pages. owner: ``[slots]`` int32, whose slot it is, -1 if nobody's;
    entry: ``[slots]`` int64, which entry of its sequence lies there.
    """

    problem: Problem
    size: int
    table: Tensor = field(init=False)
    owner: Tensor = field(init=False)
    entry: Tensor = field(init=False)

    def __post_init__(self) -> None:
        caches = self.problem.caches
        device, width = caches.bench.device, -(-caches.entries // self.size)
        self.table = torch.randperm(caches.rows * width, device=device).view(caches.rows, width)
        logical = torch.arange(width * self.size, device=device).view(width, self.size).repeat(caches.rows, 1, 1)
        row = torch.arange(caches.rows, device=device).view(-1, 1, 1)
        self.owner = self.spread(torch.where(logical < caches.entries, row, -1).int())
        self.entry = self.spread(logical)

    def spread(self, by_page: Tensor) -> Tensor:
        """``[rows, pages, size, ...]`` to ``[slots, ...]``."""
        planes = by_page.new_empty(by_page.shape[0] * by_page.shape[1], *by_page.shape[2:])
        planes[self.table.flatten()] = by_page.flatten(0, 1)
        return planes.flatten(0, 1)

    def of(self, plane: Tensor) -> Tensor:
        """``[rows, H, n, ...]`` by entry to ``[slots, H, ...]``; what is nobody's is zero."""
        rows, width = self.table.shape
        missing = width * self.size - plane.shape[2]
        by_entry = plane.transpose(1, 2)
        if missing:
            zeros = by_entry.new_zeros(rows, missing, *by_entry.shape[2:])
            by_entry = torch.cat([by_entry, zeros], 1)
        return self.spread(by_entry.unflatten(1, (width, self.size)))

    def seen(self, num_queries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pages that the newest queries see, for a block mask: how many in part, which, how many whole, and which.

        ``[rows, 1, blocks of queries]`` and, with all pages of a sequence, ``[rows, 1, blocks of queries, pages]``,
        int32; what lies behind the count is not looked at. A single query sees none whole.
        """
        entries, (rows, width) = self.problem.caches.entries, self.table.shape
        device, first = self.table.device, entries - num_queries
        starts = torch.arange(0, num_queries, FLEX_QUERY_BLOCK, device=device)
        newest = first + (starts + FLEX_QUERY_BLOCK).clamp(max=num_queries) - 1  # entry of the block's last query
        whole = (first + starts + 1) // self.size
        if num_queries == 1:
            whole = torch.zeros_like(whole)
        in_order = torch.arange(width, device=device).expand(len(starts), -1)

        def listed(order: Tensor) -> Tensor:
            return self.table[:, order].unsqueeze(1).int().contiguous()

        def counted(count: Tensor) -> Tensor:
            return count.int().expand(rows, 1, -1).contiguous()

        in_part = listed((in_order + whole.unsqueeze(1)) % width)  # they follow the whole ones
        return counted(newest // self.size + 1 - whole), in_part, counted(whole), listed(in_order)


def flex(problem: Problem, size: int) -> Run:
    """FlexAttention over pages: its block mask lists each sequence's pages, and votes are looked up by slot."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    caches, groups, num_queries = problem.caches, problem.groups, problem.num_queries
    pages, first = PagedPlanes(problem, size), caches.entries - num_queries
    owner, entry = pages.owner, pages.entry
    votes = pages.of(problem.votes.unsqueeze(-1))[..., 0].T.contiguous()  # [H, slots]
    copies = [
        tuple(pages.of(plane).transpose(0, 1).unsqueeze(0).contiguous() for plane in planes)
        for planes in problem.gathered
    ]

    def with_votes(score: Tensor, row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return score + votes[head // groups, slot]

    def is_seen(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return (owner[slot] == row) & (entry[slot] <= first + query)

    arguments: dict[str, Any] = {}
    if "compute_q_blocks" in inspect.signature(BlockMask.from_kv_blocks).parameters:
        arguments["compute_q_blocks"] = False  # for gradients
    # Where whole pages are told apart, its decoding kernel cuts them into splits as if each sequence had all pages
    # that there are, and leaves most splits nothing.
    mask = BlockMask.from_kv_blocks(
        *pages.seen(num_queries)[: 2 if num_queries == 1 else 4],
        BLOCK_SIZE=(FLEX_QUERY_BLOCK, size),
        mask_mod=is_seen,
        seq_lengths=(num_queries, len(owner)),
        **arguments,
    )

    attend = partial(
        flex_attention,
        score_mod=with_votes,
        block_mask=mask,
        scale=problem.scale,
        enable_gqa=groups > 1,
        # A tile is not to reach beyond a page, which only its decoding kernel sees to by itself.
        kernel_options={"BLOCK_N": size} if size < 64 and num_queries > 1 else None,
    )
    if caches.bench.is_gpu:
        # Each shape has kernels of its own; past a number of them torch would run them uncompiled, without a word.
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, dynamic=False)
    query = problem.by_head.contiguous()

    def run(number: int) -> Tensor:
        output = attend(query, *copies[number % len(copies)])
        assert isinstance(output, Tensor)
        return output

    return run
