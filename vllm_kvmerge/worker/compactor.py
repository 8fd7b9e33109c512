"""Executes compression plans: asks each request's policy what changes, and changes that in the pages."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_kvmerge import kernels
from vllm_kvmerge.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.cache.plan import CompressionPlan
from vllm_kvmerge.kernels import Pages, Units
from vllm_kvmerge.kernels.merge import Rows
from vllm_kvmerge.kernels.page import sent
from vllm_kvmerge.policies import CompressionContext, CompressionPolicy, Outcome
from vllm_kvmerge.worker.paged_entries import PagedEntries

MAX_BATCH_BYTES = 256 << 20
"""What a policy may hold in float32 of one batch's keys, values and attention; larger batches are split."""


@dataclass(frozen=True)
class Compaction:
    """A plan, and what its execution needs to know of the request.

    source_blocks: ids of the blocks that its slots lie in before the plan. prompt_scores: statistics of its tokens if
    this is its first compression and its policy scores the prompt. ring: its newest queries if its policy reads them.
    """

    plan: CompressionPlan
    policy: CompressionPolicy
    source_blocks: Tensor
    prompt_scores: PromptScores | None = None
    ring: QueryRing | None = None

    @property
    def num_entries(self) -> int:
        """Live entries per head before the plan."""
        return self.plan.front + self.plan.num_tokens - self.plan.tail

    @property
    def num_queries(self) -> int:
        """How many of the newest queries are known."""
        return 0 if self.ring is None else len(self.ring.positions(self.plan.num_tokens))

    def newest_queries(self) -> tuple[Tensor, Tensor]:
        """``[layers, w, H * G, d]`` in the model's dtype, and ``[w]`` int64, their positions."""
        assert self.ring is not None
        return self.ring.queries(self.plan.num_tokens), self.ring.positions(self.plan.num_tokens)


@dataclass(frozen=True)
class _Unit:
    """One layer of one request; ``index`` is the request's place in its batch."""

    index: int
    compaction: Compaction
    layer: int


@dataclass(frozen=True)
class Compactor:
    """Compresses requests' caches.

    Requests whose plans have the same shape go through their policy together, with all their layers. What becomes of
    one does not depend on which others are in the batch, nor on the order of plans: blocks that a step's plans write to
    are their own or were free, so no plan writes what another reads.

    layers: each layer's pages. scale: of the attention logits. head_indices: index of each of this worker's KV heads
    among all of them. all_heads: gathers ``[H, ...]`` from all tensor-parallel workers. output_weights: gives a layer's
    output projection as ``[H, G, hidden, d]`` float32, or None where it is not known.
    """

    layers: Sequence[Pages]
    scale: float
    head_indices: list[int]
    all_heads: Callable[[Tensor], Tensor] = field(default=lambda tensor: tensor)
    output_weights: Callable[[int], Tensor | None] = field(default=lambda layer: None)

    def run(self, compactions: Sequence[Compaction]) -> list[tuple[int, int]]:
        """Executes a step's plans; the numbers of merged and evicted entries of each, over layers and heads."""
        return [(merged, evicted) for merged, evicted in self.execute(compactions).tolist()]

    def execute(self, compactions: Sequence[Compaction]) -> Tensor:
        """``run`` that waits for no card: ``[plans, 2]`` int64 on the cache's device."""
        batches: dict[tuple[object, ...], list[int]] = {}
        for index, compaction in enumerate(compactions):
            plan = compaction.plan
            shape = (plan.front == 0, compaction.num_entries, plan.budget, plan.new_front, compaction.num_queries)
            batches.setdefault((compaction.policy, *shape), []).append(index)
        parts = [self._run_batch([compactions[index] for index in indices]) for indices in batches.values()]
        order = torch.tensor([index for indices in batches.values() for index in indices], dtype=torch.int64)
        return torch.cat(parts).index_select(0, sent(order.argsort(), self.device))

    def _run_batch(self, batch: list[Compaction]) -> Tensor:
        """Executes plans of one shape; ``[plans, 2]`` int64, entries merged and evicted."""
        policy = batch[0].policy
        statistics = None
        if policy.allocator.has_layer_statistic:
            parts = [
                policy.layer_statistic(self._gather(units), self._context(units, batch, None))
                for units in self._parts(batch)
            ]
            statistics = torch.cat(parts).view(len(batch), -1)
        counts = torch.zeros(len(batch), 2, dtype=torch.int64, device=self.device)
        for units in self._parts(batch):
            context = self._context(units, batch, statistics)
            entries = self._gather(units)
            result = policy.compress(entries, context)
            per_head = torch.stack([result.outcome.merged, result.evicted], 1)
            index = sent(torch.tensor([unit.index for unit in units]), self.device)
            counts.index_add_(0, index, context.by_unit(per_head).sum(1))
            self._write(units, entries.units, result.outcome)
        return counts

    def _parts(self, batch: list[Compaction]) -> Iterator[list[_Unit]]:
        """The layers of all requests, in parts that fit in memory."""
        units = [_Unit(i, one, layer) for i, one in enumerate(batch) for layer in range(len(self.layers))]
        size = 1
        if not batch[0].policy.needs_output_weights:  # which are too large to repeat
            num_entries, head_size = batch[0].num_entries, self.layers[0].head_size
            numbers = 2 * head_size
            if batch[0].ring is not None:
                numbers += batch[0].num_queries * batch[0].ring.num_heads // self.num_heads
            size = max(1, MAX_BATCH_BYTES // (4 * self.num_heads * num_entries * numbers))
        for start in range(0, len(units), size):
            yield units[start : start + size]

    @property
    def num_heads(self) -> int:
        return len(self.head_indices)

    @property
    def device(self) -> torch.device:
        return self.layers[0].keys.device

    def _context(self, units: list[_Unit], batch: list[Compaction], statistics: Tensor | None) -> CompressionContext:
        plan, policy = batch[0].plan, batch[0].policy
        context = CompressionContext(
            budget=plan.budget,
            capacity=plan.new_front,
            num_tokens=max(one.plan.num_tokens for one in batch),
            at_prompt_end=plan.front == 0,
            num_heads=self.num_heads,
            layers=[unit.layer for unit in units for _ in self.head_indices],
            num_layers=len(self.layers),
            scale=self.scale,
            output_weights=self.output_weights(units[0].layer) if policy.needs_output_weights else None,
            layer_statistics=None if statistics is None else statistics[[unit.index for unit in units]],
            all_heads=self.all_heads,
            head_indices=self.head_indices * len(units),
        )
        if batch[0].ring is None:
            return context
        newest = {index: batch[index].newest_queries() for index in {unit.index for unit in units}}
        queries = torch.stack([newest[unit.index][0][unit.layer] for unit in units])  # [units, w, H * G, d]
        by_head = queries.unflatten(2, (self.num_heads, -1)).permute(0, 2, 3, 1, 4)
        positions = torch.stack([newest[unit.index][1] for unit in units])
        return replace(
            context,
            queries=by_head.float().flatten(0, 1),
            query_positions=positions.repeat_interleave(self.num_heads, dim=0),
        )

    def _gather(self, units: list[_Unit]) -> PagedEntries:
        entries = PagedEntries.gather(self._located(units))
        if units[0].compaction.plan.front == 0:
            # Before its first compression a request's pages hold no statistics of its own.
            entries.scores.zero_()
            entries.aux.zero_()
            for row, unit in enumerate(units):
                scores = unit.compaction.prompt_scores
                if scores is not None:
                    heads = slice(row * self.num_heads, (row + 1) * self.num_heads)
                    entries.scores[heads] = scores.scores[unit.layer, :, : len(entries)]
                    entries.aux[heads] = scores.aux[unit.layer, :, : len(entries)]
        return entries

    def _write(self, units: list[_Unit], located: Units, outcome: Outcome) -> None:
        destination = sent(torch.tensor([unit.compaction.plan.blocks for unit in units]), self.device)
        metadata = outcome.log_votes, outcome.scores, outcome.aux, outcome.positions
        rows = Rows(outcome.changed, outcome.keys, outcome.values)
        kernels.merge_entries(located, destination, outcome.kept, metadata, rows)

    def _located(self, units: list[_Unit]) -> Units:
        plans = [unit.compaction.plan for unit in units]
        sources = {unit.index: unit.compaction.source_blocks for unit in units}
        requests = list(sources)
        blocks = sent(pad_sequence(list(sources.values()), batch_first=True), self.device)
        rows = sent(torch.tensor([requests.index(unit.index) for unit in units]), self.device)
        return Units(
            self.layers,
            torch.tensor([unit.layer for unit in units]),
            blocks.index_select(0, rows),
            torch.tensor([(plan.front, plan.tail, plan.num_tokens) for plan in plans]),
        )
