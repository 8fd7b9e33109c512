"""WeightedKV: mean scores, and values that move to their right neighbours."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.policies.sampling import SEEDS, assert_same, random_entries
from vllm_kvmerge.policies import DEAD, CompressionContext, CompressionPolicy, Entries
from vllm_kvmerge.policies.indexing import mask_of
from vllm_kvmerge.policies.mergers import DropMerger, NeighbourValueMerger
from vllm_kvmerge.policies.selectors import HeavyHitter, Recent, SinkRecent
from vllm_kvmerge.policies.trackers import MeanTracker, SumTracker


def policy(selector=HeavyHitter(num_sink_tokens=1), tracker=MeanTracker()) -> CompressionPolicy:  # noqa: B008
    return CompressionPolicy(tracker=tracker, selector=selector, merger=NeighbourValueMerger())


def counted(entries: Entries, seed: int, most: int = 5) -> Entries:
    """The same entries, each seen by a random number of queries, none included."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most, entries.aux.shape, generator=generator).to(entries.aux.dtype)
    entries.aux = torch.where(entries.is_live, counts, entries.aux)
    entries.scores = torch.where(entries.is_live & (counts == 0), 0.0, entries.scores)
    return entries


def one_by_one(entries: Entries, head: int, leaving: set[int], means: list[float]) -> tuple[dict, int]:
    """Values by position once the positions in ``leaving`` have left, the smallest mean first, and how many merged."""
    index = {p: i for i, p in enumerate(entries.positions[head].tolist()) if p != DEAD}
    values = {p: entries.values[head, i] for p, i in index.items()}
    score = {p: max(means[i], 0.0) for p, i in index.items()}
    num_merged = 0
    for position in sorted(leaving, key=lambda p: (score[p], p)):
        value = values.pop(position)
        right = min((p for p in values if p > position), default=None)
        if right is None:
            continue
        # The merged entry may hand its own value on when its turn comes; whether it still exists then counts.
        total = score[position] + score[right]
        if total > 0:
            values[right] = (score[position] * value + score[right] * values[right]) / total
        num_merged += 1
    return values, num_merged


@examples(100)
@given(SEEDS, st.integers(1, 3), st.integers(4, 60), st.booleans(), st.data())
def test_equals_leaving_one_by_one(seed, num_heads, n, at_prompt_end, data):
    """Nothing but values differs from the paper's ablation, "Eviction"."""
    num_dead = data.draw(st.integers(0, n))
    entries = counted(random_entries(seed, num_heads, n, num_dead=num_dead, dtype=torch.float64), seed)
    tracker = data.draw(st.sampled_from([MeanTracker(), SumTracker()]))
    selector = data.draw(st.sampled_from([HeavyHitter(num_sink_tokens=1), SinkRecent(num_sink_tokens=1), Recent()]))
    parts = policy(selector, tracker)
    context = CompressionContext.of_layer(entries, data.draw(st.integers(parts.min_budget, n - 1)), n, at_prompt_end)
    result = parts.compress(entries, context)
    dropped = parts.model_copy(update={"merger": DropMerger()}).compress(entries, context).entries
    assert_same(replace(result.entries, values=dropped.values), dropped)
    importance, num_merged = tracker.importance(entries), 0
    for head in range(num_heads):
        live = set(entries.positions[head].tolist()) - {DEAD}
        kept = set(result.entries.positions[head].tolist()) - {DEAD}
        expected, merged = one_by_one(entries, head, live - kept, importance[head].tolist())
        num_merged += merged
        for i, position in enumerate(result.entries.positions[head].tolist()):
            if position != DEAD:
                torch.testing.assert_close(result.entries.values[head, i], expected[position], rtol=1e-9, atol=1e-12)
    assert result.num_merged == num_merged


def example(means: list[float]) -> Entries:
    """One head; the value at position i is the i-th unit vector, its mean score is given."""
    entries = random_entries(0, 1, len(means), head_size=len(means))
    entries.positions = torch.arange(len(means)).unsqueeze(0)
    entries.values = torch.eye(len(means)).unsqueeze(0)
    entries.scores, entries.aux = 2 * torch.tensor([means]), torch.full((1, len(means)), 2.0)
    return entries


@pytest.mark.parametrize(
    ("means", "budget", "expected"),
    [
        # Figure 3: the smallest, 0.1, goes into its right neighbour of 0.5.
        ([0.4, 0.1, 0.5, 0.6, 1.0], 4, {2: [0, 1 / 6, 5 / 6, 0, 0]}),
        # A chain: 1 into 2, and 2, with what it then holds, into 3.
        ([0.4, 0.1, 0.2, 0.6, 1.0], 3, {3: [0, 1 / 12, 2 / 12, 9 / 12, 0]}),
        # The other way round: 2 into 3, and 1, whose neighbour then is 3, into 3.
        ([0.4, 0.2, 0.1, 0.6, 1.0], 3, {3: [0, 1 / 4, 3 / 4 / 7, 3 / 4 * 6 / 7, 0]}),
    ],
)
def test_examples(means, budget, expected):
    entries = example(means)
    parts = policy(HeavyHitter(num_sink_tokens=1, recent_window=1))
    result = parts.compress(entries, CompressionContext.of_layer(entries, budget, 5, at_prompt_end=False)).entries
    for i, position in enumerate(result.positions[0].tolist()):
        value = torch.tensor(expected.get(position, torch.eye(5)[position].tolist()))
        torch.testing.assert_close(result.values[0, i], value.float())
    assert torch.equal(result.aux, torch.full((1, budget), 2.0))


def test_what_attention_never_used_has_no_weight():
    entries = example([0.5, 0.0, 0.0, 0.0, 1.0])
    entries.aux[0, 1:3] = 0.0  # 1 and 2 were never seen, 3 was, in vain
    entries.scores[0, 1:3] = torch.nan
    result = policy(HeavyHitter(num_sink_tokens=1, recent_window=1)).compress(
        entries, CompressionContext.of_layer(entries, 3, 5, at_prompt_end=False)
    )
    torch.testing.assert_close(result.entries.values[0].sort(0).values, torch.eye(5)[[0, 3, 4]].sort(0).values)
    assert (result.num_merged, result.num_evicted) == (2, 0)


def test_without_a_right_neighbour_an_entry_is_lost():
    class Oldest(Recent):
        def select(self, entries, importance, protected, context):
            return mask_of(entries.positions.argsort(dim=1, stable=True)[:, : context.num_kept], len(entries))

    entries = example([0.1, 0.2, 0.3, 0.4, 0.5])
    result = policy(Oldest()).compress(entries, CompressionContext.of_layer(entries, 3, 5, at_prompt_end=False))
    assert (result.num_merged, result.num_evicted) == (0, 2)
    assert torch.equal(result.entries.values[0], torch.eye(5)[:3])


def test_mean_importance():
    entries = random_entries(0, 1, 4)
    entries.scores = torch.tensor([[2.0, 3.0, 0.0, 7.0]])
    entries.aux = torch.tensor([[4.0, 1.0, 2.0, 0.0]])
    assert MeanTracker().importance(entries).tolist() == [[0.5, 3.0, 0.0, -torch.inf]]
    assert (MeanTracker().mode, MeanTracker().update_decay) == ("mean", 1.0)
