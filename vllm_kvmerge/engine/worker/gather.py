"""Inputs of compactions: entries of some layers of some requests, and the context that policies get with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.engine.worker.compaction import Batch, Numbers, SequenceLayer, numbers_of
from vllm_kvmerge.engine.worker.paged_entries import PagedEntries
from vllm_kvmerge.ops import PLAIN_SOFTMAX, HeadPages, PagedKVCache, SequenceLayers, Softmax
from vllm_kvmerge.ops.coded import slots_of
from vllm_kvmerge.ops.types import sent
from vllm_kvmerge.policies import CompressionContext, Heads, Queries
from vllm_kvmerge.policies.head_budgets import HeadBudgets
from vllm_kvmerge.policies.rescoring import newest_scores
from vllm_kvmerge.policies.rotation import Rotation

EXCESS = 2
"""Times the workspace, or what is assumed of the heads that go together, that another package's part may hold."""


@dataclass(frozen=True)
class CachedLayers:
    """A worker's layers, as compactions see them.

    layers: each layer's KV cache. scale: of the attention logits. head_indices: index of each of this worker's KV heads
    among the model's. all_heads: gathers ``[num_kv_heads, ...]`` from all tensor-parallel workers. output_weights:
    returns a layer's output projection, ``[num_kv_heads, G, hidden, d]`` in the model's dtype and the same tensor in
    each call, or None if it is unknown. softmax: returns that of a layer, whose cap all layers share. rotation: the
    model's rotary position embedding, if it is known. head_budgets: of the layers, if the server has any. group_size:
    query heads per KV head (G). hidden_size: of the model. max_bytes: working memory of a policy for a batch; larger
    batches are split, down to one KV head of one layer.
    """

    layers: Sequence[PagedKVCache]
    scale: float
    head_indices: list[int]
    all_heads: Callable[[Tensor], Tensor] = field(default=lambda tensor: tensor)
    output_weights: Callable[[int], Tensor | None] = field(default=lambda layer: None)
    softmax: Callable[[int], Softmax] = field(default=lambda layer: PLAIN_SOFTMAX)
    rotation: Rotation | None = None
    head_budgets: HeadBudgets | None = None
    group_size: int = 1
    hidden_size: int = 0
    max_bytes: int = 64 << 20

    @property
    def num_kv_heads(self) -> int:
        return len(self.head_indices)

    @property
    def block_size(self) -> int:
        return self.layers[0].block_size

    def page_size(self, batch: Batch) -> int:
        """Entries of a page of the new fronts."""
        return self.block_size * slots_of(batch.coding)

    @property
    def dtype(self) -> torch.dtype:
        """In which what is written must be finite; in 8 bits everything is that is finite before."""
        cache = self.layers[0]
        return torch.float32 if cache.is_quantised else cache.keys.dtype

    @property
    def device(self) -> torch.device:
        return self.layers[0].keys.device

    def gather(self, seq_layers: list[SequenceLayer], batch: Batch) -> PagedEntries:
        if (known := batch.gathered.get(tuple(seq_layers))) is not None:
            return known
        batch.gathered.clear()
        entries = batch.gathered[tuple(seq_layers)] = PagedEntries.gather(self._located(seq_layers, batch))
        if batch.is_of_tokens:
            # Before a request's first compression its KV blocks hold no valid statistics.
            entries.scores = self._prompt_scores(seq_layers, batch, "scores", entries.scores)
            entries.aux = self._prompt_scores(seq_layers, batch, "aux", entries.aux)
        if (rescoring := batch.compactions[0].rescoring) is not None:
            queries = self._queries(seq_layers, batch, rescoring.window)
            softmax = self._softmax([one.layer for one in seq_layers])
            entries.scores, entries.aux = newest_scores(entries, queries, rescoring.update, self.scale, softmax)
        return entries

    def context(self, seq_layers: list[SequenceLayer], batch: Batch) -> CompressionContext:
        """What policies know of sequence layers beside their entries."""
        layers, capacity, statistics = [one.layer for one in seq_layers], batch.plan.new_front, batch.statistics
        window, allocator = batch.policy.query_window, batch.policy.allocator
        budgets = None
        if batch.shares:
            budgets = torch.tensor(self._shares_of(seq_layers, batch), device="cpu")
            if batch.assignments:  # other places have no room
                capacity = int(budgets.max())
        elif not batch.settles_shares and allocator.reads_attention and not allocator.has_layer_statistic:
            budgets = torch.full((len(layers) * self.num_kv_heads,), batch.plan.budget, device="cpu")
        return CompressionContext(
            budget=batch.plan.budget,
            capacity=capacity,
            num_tokens=max(one.plan.seq_len for one in batch.compactions),
            at_prompt_end=batch.is_of_tokens,
            heads=Heads.of(layers, self.head_indices, len(self.layers), self.all_heads),
            scale=self.scale,
            softmax=self._softmax(layers),
            queries=self._queries(seq_layers, batch, window) if batch.compactions[0].ring and window else None,
            output_weights=self.output_weights(layers[0]) if batch.policy.needs_output_weights else None,
            rotation=self.rotation,
            head_budgets=self.head_budgets,
            layer_statistics=None if statistics is None else statistics[[one.request for one in seq_layers]],
            budgets=budgets,
            is_packed=bool(batch.shares),
            end=batch.plan.num_tokens if batch.plan.is_refresh else None,
            most_bytes=EXCESS * max(self.max_bytes, len(layers) * self.num_kv_heads * batch.held),
        )

    def _softmax(self, layers: list[int]) -> Softmax:
        """That of the heads of all sequence layers; layers: of each."""
        first = self.softmax(layers[0])
        if first.sinks is None:
            return first
        return Softmax(first.cap, torch.cat([one.sinks for one in map(self.softmax, layers) if one.sinks is not None]))

    def _shares_of(self, seq_layers: list[SequenceLayer], batch: Batch) -> list[int]:
        size = self.num_kv_heads
        return [share for one in seq_layers for share in batch.shares[one.request][one.layer * size :][:size]]

    def _queries(self, seq_layers: list[SequenceLayer], batch: Batch, window: int) -> Queries:
        requests = {index: row for row, index in enumerate(dict.fromkeys(one.request for one in seq_layers))}
        rings, positions, places = [], [], []
        for index in requests:
            compaction = batch.compactions[index]
            assert compaction.ring is not None
            rings.append(compaction.ring.kept)
            positions.append(compaction.ring.positions(compaction.plan.seq_len, window))
            places.append(positions[-1] % compaction.ring.window)
        where = [SequenceLayer(requests[one.request], one.layer) for one in seq_layers]
        vectors = ops.read_queries(torch.stack(places), rings, where, self.num_kv_heads)
        rows = sent(self.numbers(where).by_head, self.device)
        return Queries(vectors, torch.stack(positions).index_select(0, rows))

    def _prompt_scores(
        self, seq_layers: list[SequenceLayer], batch: Batch, plane: Literal["scores", "aux"], like: Tensor
    ) -> Tensor:
        """One of the statistics of tokens, ``[H, n]``, in the shape of ``like``; zeros where there are none."""
        parts, is_known = [], False
        for index, some in groupby(seq_layers, key=lambda one: one.request):
            layers, compaction = [one.layer for one in some], batch.compactions[index]
            if (scores := compaction.prompt_scores) is None:
                parts.append(like.new_zeros(len(layers) * self.num_kv_heads, like.shape[1]))
                continue
            of_all, is_known = getattr(scores, plane), True
            first, last = layers[0], layers[-1]
            is_whole = layers == list(range(first, last + 1))
            of_some = of_all[first : last + 1] if is_whole else of_all[layers]
            parts.append(of_some[..., : compaction.num_entries].flatten(0, 1))
        if not is_known:
            return torch.zeros_like(like)
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def _located(self, seq_layers: list[SequenceLayer], batch: Batch) -> SequenceLayers:
        if batch.complete is not None:
            caches = batch.complete.on(self.device, [one.layer for one in seq_layers])
            blocks = sent(batch.complete.blocks.repeat(len(seq_layers), 1), self.device)
            segments = torch.tensor([batch.compactions[0].segments] * len(seq_layers))
            return SequenceLayers(caches, torch.arange(len(seq_layers)), blocks, segments)
        requests = self.numbers(seq_layers).requests
        padded = _padded([one.source_blocks for one in batch.compactions])
        segments = torch.tensor([one.segments for one in batch.compactions]).index_select(0, requests)
        blocks = sent(padded, self.device).index_select(0, sent(requests, self.device))
        located = self.layers_of(seq_layers, blocks, segments)
        of_requests = [some for one in seq_layers if (some := batch.compactions[one.request].pages) is not None]
        return replace(located, pages=self.head_pages(of_requests, seq_layers)) if of_requests else located

    def new_blocks(self, seq_layers: list[SequenceLayer], batch: Batch) -> Tensor:
        """``[U, blocks]`` on the CPU, those that plans write to."""
        return torch.tensor([one.plan.blocks for one in batch.compactions]).index_select(
            0, self.numbers(seq_layers).requests
        )

    def layers_of(
        self, seq_layers: list[SequenceLayer], blocks: Tensor, segments: Tensor | None = None
    ) -> SequenceLayers:
        """The sequence layers in the pool. segments: of their live entries; None: none, they are only written to."""
        if segments is None:
            segments = torch.zeros(len(seq_layers), 3, dtype=torch.int64)
        return SequenceLayers(self.layers, self.numbers(seq_layers).layers, blocks, segments)

    def head_pages(self, requests: list[HeadPages], seq_layers: list[SequenceLayer]) -> HeadPages:
        """Those of sequence layers; ``requests``: those of each one's request."""
        layers = [one.layer for one in seq_layers]
        ids = torch.stack([pages.ids[layer] for pages, layer in zip(requests, layers, strict=True)])
        fronts = torch.stack([pages.fronts[layer] for pages, layer in zip(requests, layers, strict=True)])
        coded = requests[0].coded  # as those of the others, in all layers
        return HeadPages(self.layers, ids, fronts, None if coded is None else coded[:1].repeat(len(layers)))

    def numbers(self, seq_layers: list[SequenceLayer]) -> Numbers:
        return numbers_of(tuple(seq_layers), self.num_kv_heads)

    def sent(self, numbers: Sequence[object]) -> Tensor:
        return sent(torch.tensor(numbers), self.device)


def _padded(tables: list[Tensor]) -> Tensor:
    """``[plans, blocks]``: block tables ``[blocks]``; the last number of the shorter ones is repeated."""
    lengths = torch.tensor([len(table) for table in tables], device="cpu").unsqueeze(1)
    longest = int(lengths.max())
    if longest == int(lengths.min()):
        return torch.stack(tables)
    # On a GPU equally many launches for any number of tables.
    places = lengths.cumsum(0) - lengths + torch.arange(longest, device="cpu").minimum(lengths - 1)
    return torch.cat(tables).index_select(0, sent(places.flatten(), tables[0].device)).view(-1, longest)
