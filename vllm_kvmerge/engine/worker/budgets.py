"""Head budgets that depend on data, and the pages they need, determined before a compaction writes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from vllm_kvmerge.engine.messages import FrontReport
from vllm_kvmerge.engine.worker.arriving import Arriving
from vllm_kvmerge.engine.worker.compaction import Batch, SequenceLayer
from vllm_kvmerge.engine.worker.head_pages import PageAssignment
from vllm_kvmerge.engine.worker.units import Unit
from vllm_kvmerge.engine.worker.write import WrittenLayers
from vllm_kvmerge.policies.bounds import time_limit
from vllm_kvmerge.policies.errors import OutOfMemory, OutOfTime, PartError, PartTimeout, as_part_error
from vllm_kvmerge.policies.shares import fitted_budgets

ANALYSIS = 0.25
"""Work of reading all layers once before they are compressed (budgets, statistics), as a share of compressing them."""

R = TypeVar("R")


@dataclass(frozen=True)
class BudgetedLayers(WrittenLayers):
    """A worker's layers, whose heads get budgets.

    is_alone: no other worker compresses the same requests.
    """

    is_alone: bool = True

    @property
    def num_lanes(self) -> int:
        """KV heads of all layers."""
        return len(self.layers) * self.num_kv_heads

    def analysis(self, batch: Batch) -> Iterator[Unit]:
        """Units that look at all layers, for ``settle``."""
        allocator = batch.policy.allocator
        if allocator.has_layer_statistic:
            statistics = torch.zeros(len(batch.compactions), len(self.layers), device=self.device)
            yield from self._looks(batch, partial(self._add_statistics, statistics))
            yield Unit(partial(self._settle_statistics, batch, statistics))
        if not batch.plan.share_blocks:
            return
        batch.layer_budgets = self._of_layers(batch)
        if batch.layer_budgets is not None:
            yield Unit(lambda: None, ANALYSIS)
        elif allocator.needs_head_budgets:
            nothing = torch.zeros(1, 1, 1, device="cpu")  # of every entry
            batch.masses = nothing.expand(len(batch.compactions), self.num_lanes, batch.num_entries)
            yield Unit(lambda: None, ANALYSIS)
        else:
            yield from self._looks(batch, self._add_masses if allocator.pools_layers else self._add_budgets)

    def settle(self, batch: Batch) -> None:
        """Decides what each head gets, once all layers have been looked at."""
        if batch.plan.share_blocks:
            batch.shares.extend(self._shares(batch))
        if batch.compactions[0].may_shrink:
            batch.fronts.extend(self._fronts(batch))
        if batch.compactions[0].has_pages or batch.coding:
            batch.assignments.extend(self._assignments(batch))

    def _looks(self, batch: Batch, look: Callable[[Batch, list[SequenceLayer]], None]) -> Iterator[Unit]:
        """Units that go through all layers once."""
        for part in self.parts(batch):
            share = ANALYSIS * len(part) / (len(batch.compactions) * len(self.layers))
            yield Unit(partial(look, batch, part), share)

    def _add_statistics(self, statistics: Tensor, batch: Batch, part: list[SequenceLayer]) -> None:
        def statistic(seq_layers: list[SequenceLayer]) -> Tensor:
            entries = self.gather(seq_layers, batch)
            with time_limit(batch.time_left()):
                return batch.policy.layer_statistic(entries, self.context(seq_layers, batch))

        for some, values in contained(part, batch.failed, statistic):
            places = self.sent(some)
            statistics[places[:, 0], places[:, 1]] = values.float()

    def _settle_statistics(self, batch: Batch, statistics: Tensor) -> None:
        arriving = Arriving.of(statistics)
        batch.budget_data.extend(arriving[index] for index in range(len(batch.compactions)))
        batch.statistics = statistics
        if not batch.settles_shares:  # all layers are alike where nothing is known
            alike = [1.0] * len(self.layers)
            earlier = [alike if one.budget_data is None else one.budget_data.take() for one in batch.compactions]
            batch.statistics = torch.tensor(earlier, device="cpu")

    def _of_layers(self, batch: Batch) -> list[int] | None:
        """The policy's budgets of layers, if they do not follow data."""
        try:
            return batch.policy.layer_budgets(batch.plan.budget, batch.num_entries, len(self.layers))
        except PartError as error:
            batch.failed.update(dict.fromkeys(range(len(batch.compactions)), error))
            return None

    def _add_budgets(self, batch: Batch, part: list[SequenceLayer]) -> None:
        def of_heads(seq_layers: list[SequenceLayer]) -> Tensor:
            entries = self.gather(seq_layers, batch)
            with time_limit(batch.time_left()):
                return batch.policy.head_budgets(entries, self.context(seq_layers, batch))

        for some, given in contained(part, batch.failed, of_heads):
            if batch.budgets is None:
                batch.budgets = self._unknown_budgets(batch, given.device)
            for place, heads in self._heads_of(some):
                batch.budgets[place] = given[heads]

    def _add_masses(self, batch: Batch, part: list[SequenceLayer]) -> None:
        def mass_of(seq_layers: list[SequenceLayer]) -> Tensor:
            entries = self.gather(seq_layers, batch)
            with time_limit(batch.time_left()):
                return batch.policy.pooled_mass(entries, self.context(seq_layers, batch))

        if batch.masses is None:
            shape = len(batch.compactions), self.num_lanes, batch.num_entries
            batch.masses = torch.empty(shape, device=self.device)
        for some, found in contained(part, batch.failed, mass_of):
            for place, heads in self._heads_of(some):
                batch.masses[place] = found[heads]

    def _heads_of(self, seq_layers: list[SequenceLayer]) -> Iterator[tuple[tuple[int, slice], slice]]:
        """Of each sequence layer: where its heads are among those of all layers of all requests, and among these."""
        size = self.num_kv_heads
        for row, (request, layer) in enumerate(seq_layers):
            yield (request, slice(layer * size, (layer + 1) * size)), slice(row * size, (row + 1) * size)

    def _split_masses(self, batch: Batch) -> None:
        """Budgets of a policy that compares the heads of all layers."""
        masses = batch.masses
        assert masses is not None

        def split(seq_layers: list[SequenceLayer]) -> Tensor:
            with time_limit(batch.time_left()):
                context = self.context(seq_layers, batch)
                return batch.policy.pooled_budgets(masses[seq_layers[0].request], context)

        for request in range(len(batch.compactions)):
            layers = [SequenceLayer(request, layer) for layer in range(len(self.layers))]
            for _, given in contained(layers, batch.failed, split):
                if batch.budgets is None:
                    batch.budgets = self._unknown_budgets(batch, given.device)
                batch.budgets[request] = given

    def _shares(self, batch: Batch) -> list[list[int]]:
        """``Batch.shares`` by the policy's budgets; equal ones where it failed.

        A plan that does not settle them takes what the last compaction found, or, where nothing is known, what heads
        hold: it waits for no GPU.
        """
        plan, policy, count = batch.plan, batch.policy, len(batch.compactions)
        if batch.layer_budgets is not None:
            budgets = [[one for one in batch.layer_budgets for _ in range(self.num_kv_heads)]] * count
        else:
            if batch.masses is not None:
                self._split_masses(batch)
            found = self._unknown_budgets(batch, torch.device("cpu")) if batch.budgets is None else batch.budgets
            if not policy.allocator.has_layer_statistic:
                arriving = Arriving.of(found)
                batch.budget_data.extend(arriving[index] for index in range(count))
            budgets = [self._usable_budgets(index, found, batch) for index in range(count)]
        room = plan.share_blocks, self.page_size(batch), policy.min_budget, plan.new_front
        return [
            compaction.filled(fitted_budgets(policy.allocator, one, self.num_kv_heads, *room))
            for compaction, one in zip(batch.compactions, budgets, strict=True)
        ]

    def _usable_budgets(self, index: int, found: Tensor, batch: Batch) -> list[int]:
        """Budgets of a request's heads, layer by layer. found: what its policy has just found."""
        compaction, plan = batch.compactions[index], batch.plan
        if index in batch.failed:
            return [plan.budget] * found.shape[1]
        allocator = batch.policy.allocator
        is_settled = batch.settles_shares or allocator.needs_head_budgets  # the latter wait for nothing
        if is_settled or (allocator.has_layer_statistic and compaction.budget_data is not None):
            numbers = found[index].tolist()
        elif compaction.budget_data is not None:
            numbers = compaction.budget_data.take()
        elif compaction.pages is not None:
            numbers = compaction.pages.fronts.flatten().tolist()
        else:
            return [plan.budget] * found.shape[1]
        return [int(budget) for budget in numbers]

    def _unknown_budgets(self, batch: Batch, device: torch.device) -> Tensor:
        """``[plans, heads of all layers]`` int64, to be filled with budgets of heads."""
        shape = len(batch.compactions), self.num_lanes
        return torch.full(shape, batch.plan.budget, dtype=torch.int64, device=device)

    def _fronts(self, batch: Batch) -> list[FrontReport]:
        """What the shares of each request come to: as many blocks as the tensor-parallel worker takes that needs most,
        and the mean of all workers' entries."""
        num_lanes, size = self.num_lanes, self.page_size(batch)
        pages = [sum(-(-share // size) for share in shares) for shares in batch.shares]
        needed = [(-(-count // num_lanes), sum(shares)) for count, shares in zip(pages, batch.shares, strict=True)]
        by_head = torch.tensor([needed], device="cpu")
        if not self.is_alone:
            by_head = self.all_heads(self.sent(needed).repeat(self.num_kv_heads, 1, 1))
        blocks, entries = by_head[..., 0].amax(0).tolist(), by_head[..., 1].double().mean(0).tolist()
        numbers = zip(batch.compactions, blocks, entries, strict=True)
        return [FrontReport(one.plan.seq_len, count, math.ceil(total / num_lanes)) for one, count, total in numbers]

    def _assignments(self, batch: Batch) -> list[PageAssignment]:
        """New pages for the heads of each request. A coded front has some even if heads are alike."""
        alike = [[one.plan.new_front] * self.num_lanes for one in batch.compactions]
        allocator = batch.policy.allocator
        within_layers = allocator.splits_heads and allocator.fills_budget and not allocator.pools_layers
        blocks = [one.plan.blocks for one in batch.compactions]
        if batch.fronts:
            blocks = [some[: front.num_blocks] for some, front in zip(blocks, batch.fronts, strict=True)]
        return [
            PageAssignment.of(self.layers, shares, one.plan.new_front, some, one.pages, within_layers, batch.coding)
            for one, shares, some in zip(batch.compactions, batch.shares or alike, blocks, strict=True)
        ]

    def parts(self, batch: Batch) -> Iterator[list[SequenceLayer]]:
        """The layers of all requests, in parts that fit in memory; one at a time for policies that need output
        projections, which are large, for layers that are copied to a GPU, and where heads go one after the other."""
        num_requests, num_layers = len(batch.compactions), len(self.layers)
        seq_layers = [SequenceLayer(i, layer) for i in range(num_requests) for layer in range(num_layers)]
        if batch.assignments:  # layers that take pages of others go last
            seq_layers.sort(key=lambda one: bool(batch.assignments[one.request].grows[one.layer].all()))
        is_copied = batch.complete is not None and self.device.type != "cpu"
        is_together = not batch.num_rows and not batch.policy.needs_output_weights and not is_copied
        size = max(1, self.max_bytes // (self.num_kv_heads * batch.held)) if is_together else 1
        for start in range(0, len(seq_layers), size):
            yield seq_layers[start : start + size]

    def budget_data_length(self, numbers: Tensor) -> int:
        """Length of an ``Execution.budget_data`` like ``numbers``: statistics of layers, or whole numbers of heads."""
        return len(self.layers) * (1 if numbers.is_floating_point() else self.num_kv_heads)


def contained(
    seq_layers: list[SequenceLayer], failed: dict[int, PartError], run: Callable[[list[SequenceLayer]], R]
) -> Iterator[tuple[list[SequenceLayer], R]]:
    """Calls ``run``, which has no side effects, on the sequence layers of the requests that have not failed.

    If it raises, each request is retried alone, and those that raise again have failed. After a timeout all have
    failed: retrying each would keep everybody waiting.
    """
    sound = [one for one in seq_layers if one.request not in failed]
    if not sound:
        return
    requests = [list(some) for _, some in groupby(sound, key=lambda one: one.request)]
    try:
        result = run(sound)
    except (Exception, OutOfTime, OutOfMemory) as error:
        fault = as_part_error(error)
        if len(requests) == 1 or isinstance(fault, PartTimeout):
            failed.update(dict.fromkeys((some[0].request for some in requests), fault))
            return
    else:
        yield sound, result
        return
    for some in requests:
        yield from contained(some, failed, run)
