"""The plans of one step, executed together, do what each would do alone; and they read no more than they need."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.entries import gather_entries
from tests.policies.sampling import rope
from vllm_kvmerge import ops
from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.messages import Compress
from vllm_kvmerge.engine.worker import budgets
from vllm_kvmerge.engine.worker.compaction import Compaction, Execution
from vllm_kvmerge.engine.worker.compactor import Compactor
from vllm_kvmerge.ops import PagedKVCache, ScoreMode, cell_bytes
from vllm_kvmerge.policies import PRESETS, CompressionPolicy, Entries, tiles
from vllm_kvmerge.policies.allocators import Uniform
from vllm_kvmerge.policies.errors import as_part_error
from vllm_kvmerge.policies.head_budgets import HeadBudgets
from vllm_kvmerge.request.spec import parse_compression

NUM_LAYERS, NUM_HEADS, GROUPS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS = 3, 2, 2, 16, 16, 128
BUDGET, INTERVAL = 50, 16


class Foreign(Uniform):
    """An allocator of another package, as its module says."""

    name = "foreign"
    weights: list[float] = []

    def head_budgets(self, entries, importance, context):
        return [max(context.min_budget, context.budget - 4 * (row % 2)) for row in range(entries.num_rows)]


class Worker:
    """A worker's cache with some requests in it, each of them compressed once and grown by an interval since."""

    def __init__(
        self,
        policy: str,
        lengths: tuple[int, ...],
        dtype: torch.dtype = torch.bfloat16,
        num_blocks: int = NUM_BLOCKS,
        budgets: tuple[int, ...] = (),
        seed: int = 0,
        **fields: Any,
    ) -> None:
        """budgets: of each request; none: BUDGET."""
        self.generator = torch.Generator().manual_seed(seed)
        window = {"window_size": 32} if policy == "kvzap" else {}  # by default it protects more than the budget
        self.text = json.dumps({"policy": policy, "budget": BUDGET, **window, **fields})
        self.config = parse_compression(self.text)
        allocator, budgets = self.config.policy.allocator, budgets or (BUDGET,) * len(lengths)
        self.capacity = min(allocator.capacity(BUDGET), *lengths)
        elements = cell_bytes(HEAD_SIZE, dtype) // dtype.itemsize
        self.caches = [
            torch.randn(num_blocks, NUM_HEADS, BLOCK_SIZE, elements, generator=self.generator).to(dtype)
            for _ in range(NUM_LAYERS)
        ]
        self.layers = [PagedKVCache.of(cache, HEAD_SIZE) for cache in self.caches]
        for pages in self.layers:
            pages.scores.copy_(torch.rand(pages.scores.shape, generator=self.generator))
            pages.aux.copy_(torch.randint(1, 9, pages.aux.shape, generator=self.generator))
            if self.config.policy.tracker.mode == ScoreMode.SUM:
                pages.aux.zero_()
        weights = torch.randn(NUM_LAYERS, NUM_HEADS, GROUPS, 24, HEAD_SIZE, generator=self.generator)
        self.compactor = Compactor(
            self.layers,
            HEAD_SIZE**-0.5,
            list(range(NUM_HEADS)),
            output_weights=lambda layer: weights[layer],
            rotation=rope(HEAD_SIZE),
            head_budgets=HeadBudgets(
                fingerprint="", shares=torch.rand(NUM_LAYERS, NUM_HEADS, generator=self.generator).add(0.1).tolist()
            ),
        )
        free = (torch.randperm(num_blocks - 1, generator=self.generator) + 1).tolist()
        self.first, self.second, self.third = [], [], []
        for index, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
            capacity = min(allocator.capacity(budget), *lengths)
            blocks = [free.pop() for _ in range(-(-(length + 2 * INTERVAL) // BLOCK_SIZE))]
            front = blocks[: -(-capacity // BLOCK_SIZE)]
            scores = PromptScores.empty(NUM_LAYERS, NUM_HEADS, length)
            scores.scores.copy_(torch.rand(scores.scores.shape, generator=self.generator))
            if self.config.policy.tracker.mode != ScoreMode.SUM:
                scores.aux.fill_(4.0)
            tails = length, length + INTERVAL
            segments = (0, 0, length), *((capacity, tail, tail + INTERVAL) for tail in tails)
            for step, some in zip((self.first, self.second, self.third), segments, strict=True):
                statistics = None if step is not self.first else scores
                step.append(self._compaction(index, *some, capacity, budget, blocks, front, statistics))

    def _compaction(self, index, front, tail, num_tokens, capacity, budget, blocks, destination, scores) -> Compaction:
        window = self.config.policy.query_window
        ring = None
        if window:
            ring = QueryRing.empty(NUM_LAYERS, window, NUM_HEADS * GROUPS, HEAD_SIZE, torch.float32)
            for layer in range(NUM_LAYERS):
                queries = torch.randn(window, NUM_HEADS * GROUPS, HEAD_SIZE, generator=self.generator)
                ring.write(layer, queries, num_tokens)
        plan = Compress(str(index), self.text, "growth", num_tokens, num_tokens, budget, capacity, destination)
        return Compaction(plan, self.config.policy, torch.tensor(blocks), scores, ring, front=front, tail=tail)

    @property
    def bytes(self) -> torch.Tensor:
        return torch.stack(self.caches).view(torch.uint8).clone()

    def use(self, policy: CompressionPolicy) -> "Worker":
        """Has all requests compressed by another policy."""
        for step in (self.first, self.second, self.third):
            step[:] = [replace(one, policy=policy) for one in step]
        return self

    def fronts(self, compaction: Compaction) -> list[Entries]:
        """Of each layer, after the compaction."""
        plan = compaction.plan
        blocks, end = torch.tensor(plan.blocks), plan.num_tokens
        return [gather_entries(pages, blocks, plan.new_front, end, end) for pages in self.layers]


@pytest.mark.parametrize("policy", PRESETS)
def test_requests_do_not_depend_on_each_other(policy):
    lengths = (150, 150, 190, 230)
    together, alone, split = (Worker(policy, lengths) for _ in range(3))
    one_by_one_layer = replace(split.compactor, max_bytes=1)
    for step in ("first", "second"):
        counts = together.compactor.run(getattr(together, step))
        one_by_one = [alone.compactor.run([one])[0] for one in reversed(getattr(alone, step))]
        assert counts == one_by_one[::-1]
        assert torch.equal(together.bytes, alone.bytes)
        assert one_by_one_layer.run(getattr(split, step)) == counts
        assert torch.equal(split.bytes, together.bytes)
        n = [one.num_entries for one in getattr(together, step)]
        assert n == (list(lengths) if step == "first" else [together.capacity + INTERVAL] * 4)
    assert all(sum(count) > 0 for count in counts)


@pytest.mark.parametrize("protect", [((200, 204),), ((1, 4), (30, 33))])
@pytest.mark.parametrize("policy", ["h2o", "keepkv", "zsmerge", "weightedkv"])
@pytest.mark.parametrize(("heads", "size"), [(2, 16), (6, 32)], ids=["by PyTorch", "native"])
def test_protected_tokens_of_each_request_count(policy, protect, heads, size, monkeypatch):
    """A request that has not come to them keeps its whole budget beside one that has. The CPU's own operators on
    entries take heads of 32."""
    monkeypatch.setattr(f"{__name__}.NUM_HEADS", heads)
    monkeypatch.setattr(f"{__name__}.HEAD_SIZE", size)
    faults = []  # in batches, after which each request is tried alone
    monkeypatch.setattr(budgets, "as_part_error", lambda error: faults.append(error) or as_part_error(error))
    workers = [Worker(policy, (100, 230), budgets=(40, 50)) for _ in range(2)]
    for pages in (*workers[0].layers, *workers[1].layers):
        pages.scores.copy_(pages.scores.mul(9).round() / 10)  # many are equal, or nearly
    policy = workers[0].config.policy
    parts = {name: getattr(policy, name) for name in ("tracker", "selector", "merger")}
    for worker in workers:
        worker.use(CompressionPolicy(**parts, protect=protect))
    for step in ("first", "second", "third"):
        if step == "third" and policy.tracker.mode == ScoreMode.SUM:
            for worker in workers:  # slots are lost, and founded anew by entries from behind the front
                for pages in worker.layers:
                    pages.aux.zero_()
                    pages.scores.add_(1.0)
                    for one in worker.third:
                        pages.scores[one.source_blocks[one.tail // BLOCK_SIZE :]] = 0.0
        together = workers[0].compactor.execute(getattr(workers[0], step)).counts
        alone = [workers[1].compactor.execute([one]).counts[0] for one in getattr(workers[1], step)]
        assert torch.equal(together, torch.stack(alone)) and not faults
        assert torch.equal(workers[0].bytes, workers[1].bytes)


def test_an_allocator_of_another_package_is_asked_for_each_request():
    """Its parameters need not be hashable, and it may give heads what it likes."""
    workers = [Worker("h2o", (150, 190), budgets=(40, 63)) for _ in range(2)]
    parts = {name: getattr(workers[0].config.policy, name) for name in ("tracker", "selector", "merger")}
    for worker in workers:
        worker.use(CompressionPolicy(**parts, allocator=Foreign(weights=[1.0, 0.5])))
    for step in ("first", "second"):
        together = workers[0].compactor.execute(getattr(workers[0], step))
        alone = [workers[1].compactor.execute([one]).counts[0] for one in getattr(workers[1], step)]
        assert not together.failures and torch.equal(together.counts, torch.stack(alone))


@pytest.mark.thin(4)
@pytest.mark.parametrize("num_parts", [3, 1000])
@pytest.mark.parametrize("policy", PRESETS)
def test_in_parts_by_turns(policy, num_parts):
    """By layers or by heads, with another one's parts in between."""
    at_once, in_parts = (Worker(policy, (150, 190)) for _ in range(2))
    for step in ("first", "second"):
        compactions = getattr(in_parts, step)
        batches = dict(enumerate(in_parts.compactor.begin(one, num_parts) for one in compactions))
        least = num_parts if num_parts < NUM_LAYERS * NUM_HEADS else NUM_LAYERS
        for until in (2, 5, 8):
            for begun in batches.values():
                before = begun.work.progress
                begun.advance(until / 10)
                assert before < begun.work.progress and abs(begun.work.progress - until / 10) <= 1 / least
        done = in_parts.compactor.execute(compactions, batches)
        assert not done.failures and all(begun.work.progress == pytest.approx(1.0) for begun in batches.values())
        counts = at_once.compactor.run(getattr(at_once, step))
        assert [(merged, evicted) for merged, evicted, *_ in done.counts.tolist()] == counts
        assert torch.equal(in_parts.bytes, at_once.bytes)


@pytest.mark.parametrize(("policy", "least"), [("h2o", 1.0), ("keepkv", 0.5), ("tova", NUM_HEADS), ("adakv", 1.0)])
def test_a_step_may_ask_for_a_single_unit(policy, least, monkeypatch):
    """Of a head, a tile of one, or a layer; workers with other data do as many."""
    monkeypatch.setattr(tiles, "TILE_PRODUCTS", 1 << 14)
    workers = [Worker(policy, (150,), seed=seed) for seed in (0, 1)]
    begun = [one.compactor.begin(one.first[0], 1000) for one in workers]
    for until in (1e-6, 2e-6, 0.3, 0.6):
        for one in begun:
            before = one.work.progress
            one.advance(until)
            if until == 1e-6:
                assert 0.0 < one.work.progress <= least / (NUM_LAYERS * NUM_HEADS)
            if until == 2e-6:
                assert one.work.progress == before
        if policy != "keepkv":  # the number of whose passes depends on data
            assert begun[0].work.progress == begun[1].work.progress
    for worker, one in zip(workers, begun, strict=True):
        assert not worker.compactor.execute(worker.first[:1], {0: one}).failures
        assert one.work.progress == pytest.approx(1.0)


@pytest.mark.parametrize("policy", ["h2o", "keepkv", "tova"])
def test_what_takes_too_long_for_a_step_is_left(policy):
    """But for one unit, and not where workers that exchange something would wait for each other."""
    worker = Worker(policy, (150,))
    begun = worker.compactor.begin(worker.first[0], 1000)
    begun.advance(0.9, max_seconds=0.0)
    if policy == "tova":
        assert begun.work.progress >= 0.9 - 1 / NUM_LAYERS
    else:
        assert begun.work.progress <= 1 / (NUM_LAYERS * NUM_HEADS)
    assert not worker.compactor.execute(worker.first[:1], {0: begun}).failures
    assert begun.work.progress == pytest.approx(1.0)


def test_plans_of_different_shapes_and_policies_in_one_step():
    workers = [Worker("h2o", (150, 170, 150, 150)) for _ in range(2)]
    steps = []
    for worker in workers:
        worker.compactor.run([worker.first[0], worker.first[3]])
        streaming = parse_compression({"policy": "streaming_llm", "budget": 50}).policy
        steps.append([worker.second[0], replace(worker.first[1], policy=streaming), worker.first[2], worker.second[3]])
    together = workers[0].compactor.run(steps[0])
    assert together == [workers[1].compactor.run([one])[0] for one in steps[1]]
    assert torch.equal(workers[0].bytes, workers[1].bytes)
    assert [sum(count) for count in together] == [count * NUM_LAYERS * NUM_HEADS for count in (16, 120, 100, 16)]


@pytest.mark.parametrize("policy", ["adakv", "kvzip", "kvzap", "d2o", "h2o"])
def test_budgets_are_those_that_the_last_compaction_found(policy):
    """Where a plan does not settle them: whatever the scores say now, which the next one is known."""
    worker = Worker(policy, (150, 150), **({"allocator": "threshold", "threshold": 0.01} if policy == "h2o" else {}))

    def planned(step: list[Compaction], settles: bool, before: Execution | None) -> list[Compaction]:
        found = []
        for index, one in enumerate(step):
            blocks = one.plan.blocks[: -(-BUDGET // BLOCK_SIZE)]
            plan = replace(one.plan, blocks=blocks, share_blocks=len(blocks))
            pages = None if before is None else before.pages[index]
            earlier = None if before is None else before.budget_data.get(index)
            own = {"has_pages": True, "settles_shares": settles, "pages": pages, "budget_data": earlier}
            found.append(replace(one, plan=plan, **own))
        return found

    def run(compactions: list[Compaction]) -> tuple[Execution, list[list[int]], torch.Tensor]:
        before = [cache.clone() for cache in worker.caches]
        done, after = worker.compactor.execute(compactions), worker.bytes
        assert not done.failures and set(done.budget_data) == {0, 1}
        for cache, old in zip(worker.caches, before, strict=True):
            cache.copy_(old)
        return done, [done.pages[index].fronts.flatten().tolist() for index in (0, 1)], after

    first = worker.compactor.execute(planned(worker.first, True, None))
    for pages in worker.layers:  # attention goes to others than before
        pages.scores.copy_(torch.rand(pages.scores.shape, generator=worker.generator).pow(8))
    settled, fronts, written = run(planned(worker.second, True, first))
    late, late_fronts, _ = run(planned(worker.second, False, first))
    assert [one.take() for one in late.budget_data.values()] == [one.take() for one in settled.budget_data.values()]
    # Had the last one found what this one does, it would come to the same.
    known = replace(first, budget_data=settled.budget_data)
    again, told_fronts, told_written = run(planned(worker.second, False, known))
    assert told_fronts == fronts and torch.equal(told_written, written)
    # Where nothing is known, heads keep what they have.
    _, kept_fronts, _ = run(planned(worker.second, False, replace(first, budget_data={})))
    held = [first.pages[index].fronts.flatten().tolist() for index in (0, 1)]
    if policy == "d2o":
        assert len(set(late.budget_data[0].take())) == NUM_LAYERS
    else:
        assert kept_fronts == held and late_fronts != fronts
    one_alone, alone_fronts, _ = run([replace(one, pages=None) for one in planned(worker.second, False, None)])
    assert alone_fronts == [[BUDGET] * NUM_LAYERS * NUM_HEADS] * 2


READS_NOTHING = ("local", "streaming_llm", "h2o", "snapkv", "tova", "random", "pyramidkv", "pyramidinfer", "adakv")
"""Policies that decide by metadata alone and drop."""

MERGES = ("keepkv", "zsmerge", "weightedkv", "d2o", "kvmerger", "cam", "asymkv")
"""Policies that also read what leaves and what that goes into."""


@pytest.mark.parametrize("policy", [*READS_NOTHING, *MERGES])
def test_what_is_read_and_written_in_steady_state(policy):
    worker = Worker(policy, (150, 150))
    worker.compactor.run(worker.first)
    with (
        patch.object(ops, "gather_rows", wraps=ops.gather_rows) as gathers,
        patch.object(ops, "most_similar", wraps=ops.most_similar) as similar,
        patch.object(ops, "merge_entries", wraps=ops.merge_entries) as merges,
    ):
        counts = worker.compactor.run(worker.second)
    rows = Counter()
    for _, plane, index, *_ in (call.args for call in gathers.call_args_list):
        rows[plane] += int((index >= 0).sum())
    for _, _, kept, _, merged in (call.args for call in merges.call_args_list):
        rows["moved"] += int(((kept >= 0) & (kept != torch.arange(kept.shape[1]))).sum())
        if merged.keys is not None or merged.values is not None:
            rows["written"] += int((merged.places >= 0).sum())
    heads = 2 * NUM_LAYERS * NUM_HEADS
    leaving = sum(merged + evicted for merged, evicted in counts)
    assert leaving > 0 and rows["moved"] <= INTERVAL * heads
    if policy in READS_NOTHING:
        assert not rows["keys"] and not rows["values"] and not similar.called and not rows["written"]
        return
    assert similar.called == (policy in ("keepkv", "d2o", "kvmerger"))
    if policy == "cam":  # an entry that leaves goes into up to 16
        assert not rows["keys"] and 0 < rows["values"] <= leaving + 50 * heads
        return
    # What leaves, and one that it goes into; of keys zsmerge compares with all of its slots, an eighth of the budget.
    assert rows["values"] <= 2 * leaving and rows["written"] <= leaving
    assert rows["keys"] <= (50 // 8 * heads if policy == "zsmerge" else 0) + 4 * leaving
    if policy == "weightedkv":
        assert not rows["keys"]
