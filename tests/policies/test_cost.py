"""What parts state that they cost: never less memory than is really held, and more for more entries."""

import sys
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from compaction_cost import Scene, Sizes, peak_bytes  # noqa: E402

from vllm_kvmerge import ops
from vllm_kvmerge.ops import cpu
from vllm_kvmerge.ops.zipping import ZipGroups
from vllm_kvmerge.policies import DEAD, PARTS, PRESETS, CompressionPolicy, indexing, update
from vllm_kvmerge.policies.choice import PartNames
from vllm_kvmerge.policies.cost import Cost, CostShape, Rates, measure_rates
from vllm_kvmerge.policies.selectors import Recent
from vllm_kvmerge.request.parameters import CompressionError

pytestmark = pytest.mark.skipif(not cpu.LIBRARY.exists(), reason="the native operators are not built")

PARTS_BY_NAME = [(kind, name) for kind in ("selector", "merger", "allocator") for name in PARTS[kind]]

SHAPES = [(Sizes(kv_heads=2), 1500, 150), (Sizes(kv_heads=4, head_size=32, group_size=2, hidden_size=256), 700, 550)]
"""What leaves is far more than what stays, or less; all is more than is read at a time, or less."""


def assert_enough_is_stated(parameters: dict, sizes: Sizes, num_entries: int, budget: int) -> None:
    torch.manual_seed(0)
    scene = Scene(sizes, parameters, num_entries, budget, interval=16)
    for compaction in (scene.first, scene.second)[: 1 + scene.bounded]:
        stated = 4 * scene.cost(compaction).numbers * sizes.layers * sizes.kv_heads
        real = peak_bytes(lambda: scene.run(compaction))  # noqa: B023
        assert 0 < real <= stated, (parameters, compaction.plan)


@pytest.mark.parametrize(("sizes", "num_entries", "budget"), SHAPES, ids=["much-leaves", "little-leaves"])
@pytest.mark.parametrize("policy", PRESETS)
def test_presets_hold_no_more_than_they_state(policy, sizes, num_entries, budget):
    assert_enough_is_stated({"policy": policy}, sizes, num_entries, budget)


@pytest.mark.parametrize(("sizes", "num_entries", "budget"), SHAPES, ids=["much-leaves", "little-leaves"])
@pytest.mark.parametrize(("kind", "name"), PARTS_BY_NAME)
def test_parts_hold_no_more_than_they_state(kind, name, sizes, num_entries, budget):
    """Each part in the first preset that it goes with and is not its own."""
    for policy, preset in PRESETS.items():
        if getattr(preset, kind) == name:
            continue
        try:
            assert_enough_is_stated({"policy": policy, kind: name}, sizes, num_entries, budget)
        except CompressionError:
            continue
        return
    pytest.fail("goes with no preset")


@pytest.mark.parametrize(
    "parameters",
    [
        {"policy": "keepkv", "merge_threshold": -1.0},
        {"policy": "keepkv", "merge_threshold": -1.0, "merge_first": False},
        {"policy": "h2o", "merger": "zip", "merge_threshold": -1.0, "zip_window": 200},
        {"policy": "h2o", "merger": "zip", "merge_threshold": -1.0, "head_fit": "least_squares", "merge_passes": 4},
        {"policy": "cam", "merge_prompt": True},
        {"policy": "cam", "merge_prompt": True, "num_receivers": 4096},
        {"policy": "kvmerger", "merge_threshold": -1.0},
        {"policy": "snapkv", "merger": "asymkv", "merge_first": False},
        {"policy": "zsmerge", "residual_share": 0.5},
        {"policy": "grkv", "regression_window": 200},
        {"policy": "grkv", "regression_window": 100, "steps": 3, "components": "v"},
        {"policy": "grkv", "allocator": "adaptive"},
        {"policy": "h2o", "merger": "attention_matching", "matching_window": 200},
        {"policy": "adakv", "merger": "attention_matching", "matching_window": 4},
        {"policy": "morphkv", "recent_window": 100, "kernel_size": 5},
        {"policy": "morphkv", "allocator": "adaptive"},
        {"policy": "morphkv", "recent_window": 100, "softmax_over": "distant", "group_fusion": "max"},
        {"policy": "morphkv", "recent_window": 100, "group_fusion": "max", "fusion": "max"},
        {"policy": "knorm", "allocator": "variance", "tracker": "sum"},
        {"policy": "knorm", "allocator": "pyramid"},
        {"policy": "expected_attention", "statistics_window": 1000},
        {"policy": "expected_attention", "allocator": "adaptive"},
        {"policy": "compactor", "sketch_size": 200, "decode": "bounded"},
        {"policy": "compactor", "attention_window": 700, "attention_chunk": 1000},
        {"policy": "compactor", "allocator": "variance", "tracker": "sum"},
        {"policy": "h2o", "allocator": "uniform", "skip_layers": 1},
        {"policy": "adakv", "selector": "criticalkv"},
    ],
    ids=lambda parameters: "-".join(map(str, parameters.values())),
)
def test_parameters_that_cost_much(parameters):
    assert_enough_is_stated(parameters, Sizes(layers=2, kv_heads=2), 1200, 130)


@pytest.mark.parametrize("budget", [40, 290])
@pytest.mark.parametrize("passes", [1, 3, 8])
@pytest.mark.parametrize("threshold", [0.8, -1.0])
def test_lists_as_wide_as_a_gpus(threshold, passes, budget, monkeypatch):
    """Rows of what may join and take are held there, however few do."""
    parameters = {"policy": "keepkv", "merge_threshold": threshold, "merge_passes": passes}
    zip_groups = ops.zip_groups

    def wide(sources, *rest):
        blanks = ZipGroups(DEAD, DEAD, 0, 0.0, 1.0, 0.0, 0.0, DEAD)
        found = zip(zip_groups(sources, *rest), blanks, strict=True)
        return ZipGroups(*(pad(one, (0, sources.shape[1] - one.shape[1]), value=blank) for one, blank in found))

    monkeypatch.setattr(ops, "zip_groups", wide)
    for module in (indexing, update):
        monkeypatch.setattr(module, "width_on", lambda device, most: most)
    assert_enough_is_stated(parameters, Sizes(layers=2, kv_heads=2), 320, budget)


def bytes_with_output_weights(policy: str, sizes: Sizes, exponents: list[float]) -> tuple[int, int]:
    """Stated and real, with criticalkv's selector. exponents: of each head's scores, whose logarithms spread by 4."""
    torch.manual_seed(0)
    scene = Scene(sizes, {"policy": policy, "selector": "criticalkv"}, 300, 100, interval=16)
    scores = scene.first.prompt_scores.scores
    scores.copy_((4 * torch.randn(scores.shape)).exp() ** torch.tensor(exponents)[:, None])
    stated = 4 * scene.cost(scene.first).numbers * sizes.layers * sizes.kv_heads
    return stated, peak_bytes(lambda: scene.run(scene.first))


def test_the_output_projection_is_in_float32_in_parts_alone():
    """Of a single KV head: a query head's part, of 8, where bounds of norms are computed first."""
    sizes = Sizes(kv_heads=1, group_size=8)
    stated, real = bytes_with_output_weights("criticalkv", sizes, [1.0])
    of_query_head = 4 * sizes.hidden_size * sizes.head_size
    assert of_query_head < real <= stated < sizes.group_size * of_query_head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_output_projection_is_copied_for_heads_of_one_budget(dtype):
    """For the first and the last head, whose scores are so far apart that they get the least budget."""
    sizes = Sizes(kv_heads=3, group_size=8, dtype=dtype)
    stated, real = bytes_with_output_weights("adakv", sizes, [20.0, 1.0, 20.0])
    of_two_heads = 2 * sizes.group_size * sizes.hidden_size * sizes.head_size * dtype.itemsize
    assert of_two_heads < real <= stated


def test_a_later_compression_of_a_long_prompt():
    """A context of 100 tokens before a long prompt: all of that leaves into slots at once."""
    torch.manual_seed(0)
    scene = Scene(Sizes(kv_heads=2), {"policy": "zsmerge"}, 100, 90, interval=3000)
    stated = 4 * scene.cost(scene.second).numbers * 2
    real = peak_bytes(lambda: scene.run(scene.second))
    keys = 2 * 4 * scene.second.num_entries * scene.sizes.head_size
    assert real <= stated
    assert real < 6 * keys  # and not as many numbers as there are pairs of entries, 48 times as many as keys have


def test_cam_costs_the_same_for_any_number_of_receivers():
    peaks = []
    for num_receivers in (64, 64, 4096):  # the first makes what is remembered
        torch.manual_seed(0)
        parameters = {"policy": "cam", "merge_prompt": True, "num_receivers": num_receivers}
        scene = Scene(Sizes(kv_heads=2), parameters, 1200, 60, interval=16)
        peaks.append(peak_bytes(lambda: scene.run(scene.first)))  # noqa: B023
    assert peaks[1] == peaks[2]


def policy_of(preset: str) -> CompressionPolicy:
    names = PartNames.of(PRESETS[preset])
    defaults = PRESETS[preset].defaults
    return CompressionPolicy(
        **{
            kind: part(**{field: defaults[field] for field in part.model_fields if field in defaults})
            for kind, part in names.classes.items()
        }
    )


@pytest.mark.parametrize("at_prompt_end", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_more_entries_cost_more(preset, at_prompt_end):
    policy = policy_of(preset)
    for budget in (100, 1000):
        shape = CostShape(budget + 1, budget, 64, 4, 2048, at_prompt_end)
        costs = [policy.cost(replace(shape, num_entries=n)) for n in range(budget + 1, 100_000, 997)]
        for smaller, larger in zip(costs, costs[1:], strict=False):
            assert smaller.numbers < larger.numbers and smaller.products <= larger.products
            assert smaller.touches < larger.touches
        assert all(type(value) is int for cost in costs for value in vars(cost).values())


@pytest.mark.parametrize(
    ("preset", "exponent"),
    [
        ("h2o", 1),
        ("zsmerge", 1),
        ("weightedkv", 1),
        ("cam", 1),
        ("grkv", 1),
        ("expected_attention", 1),
        ("compactor", 1),
        ("rkv", 2),
        ("keepkv", 2),
    ],
)
def test_how_seconds_grow_with_entries(preset, exponent):
    rates = Rates(1e10, 1e9)
    one, other = (
        policy_of(preset).cost(CostShape(n, 500, 64, 4, 2048, True)).seconds(rates) for n in (1 << 20, 1 << 21)
    )
    assert 2**exponent * 0.9 < other / one < 2**exponent * 1.1


def test_costs_add_up():
    one, other = Cost(1, 20, 300, 4, 7), Cost(2, 10, 500, 16, 3)
    assert one + other == Cost(3, 30, 800, 20, 10)
    assert one * 3 == Cost(1, 60, 900, 12, 21)
    assert one.largest(other) == Cost(2, 20, 500, 16, 7)
    assert (one + other).seconds(Rates(10.0, 100.0, 40.0, 5.0)) == 3.0 + 8.0 + 0.5 + 2.0
    assert (one + other).seconds(Rates(10.0, 100.0)) == 3.0 + 8.0 + 2.0 + 1.0  # as products


def test_a_part_that_says_nothing_is_taken_to_read_everything():
    shape = CostShape(1000, 100, 64, 4, 2048, True)
    assert super(Recent, Recent()).cost(shape) == Cost(numbers=4 * 64_000, touches=16 * 64_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rates_are_measured(dtype):
    assert all(1e6 < rate < 1e15 for rate in astuple(measure_rates("cpu", dtype)))
