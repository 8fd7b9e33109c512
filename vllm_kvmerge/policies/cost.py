"""Costs of compactions, in units that devices do a known number of per second."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.nn.functional import normalize

from vllm_kvmerge.ops import ScoreMode, newest_repeats, projected_norms
from vllm_kvmerge.ops.attention import MAX_ATTENTION_BYTES

MEASURING_SECONDS = 0.025

MOVED_NUMBERS = 6
"""Numbers held for each number of keys that are turned to other positions where that is not done in place."""


@dataclass(frozen=True)
class CostShape:
    """Sizes that a cost depends on, besides hyper-parameters.

    num_entries: live entries per head before the compression. budget: entries kept. group_size: query heads per KV
    head. hidden_size: rows of the output projection. tracker_mode: of the policy's tracker; set by the composition.
    """

    num_entries: int
    budget: int
    head_size: int
    group_size: int
    hidden_size: int
    at_prompt_end: bool
    tracker_mode: ScoreMode = ScoreMode.NONE

    @property
    def num_leaving(self) -> int:
        """Entries that the selector does not keep."""
        return max(0, self.num_entries - self.budget)

    @property
    def num_kept(self) -> int:
        """Entries that stay; all where the budget is larger."""
        return min(self.num_entries, self.budget)

    def num_queries(self, window: int) -> int:
        """Queries that a part finds which reads the newest ``window``, at most: a prompt has no more than entries, what
        follows a compression may."""
        return min(window, self.num_entries) if self.at_prompt_end else window

    @property
    def row_numbers(self) -> int:
        """Numbers of all keys, or of all values."""
        return self.num_entries * self.head_size


@dataclass(frozen=True)
class Cost:
    """Work of a compression for one KV head of one layer; an upper bound where it depends on data.

    numbers: most 4-byte numbers held at once, besides the KV cache; an int64 is two. products: multiply-adds in matrix
    products. touches: numbers read or written in element-wise passes over memory; operations that take longer count
    several times (``sorting``, ``gathering``). comparisons: multiply-adds in ``ops.newest_repeats``, of each pair's
    keys once. projections: multiply-adds in ``ops.projected_norms``.
    """

    numbers: int = 0
    products: int = 0
    touches: int = 0
    comparisons: int = 0
    projections: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: int) -> "Cost":
        """The same ``times`` times, one after the other."""
        numbers, *others = vars(self).values()
        return Cost(numbers, *(times * one for one in others))

    def largest(self, other: "Cost") -> "Cost":
        """The larger of both in each respect."""
        return Cost(*map(max, vars(self).values(), vars(other).values()))

    def seconds(self, rates: "Rates") -> float:
        """Duration on a device with these rates."""
        return (
            self.products / rates.products_per_second
            + self.touches / rates.touches_per_second
            + self.comparisons / (rates.comparisons_per_second or rates.products_per_second)
            + self.projections / (rates.projections_per_second or rates.products_per_second)
        )


def sorting(count: int) -> int:
    """Touches of sorting ``count`` numbers with their indices."""
    return 10 * count * max(1, count).bit_length()


def gathering(count: int) -> int:
    """Touches of reading ``count`` numbers of keys or values from KV blocks, or of adding rows to others by index."""
    return 4 * count


def comparing(num_sources: int, num_targets: int, head_size: int) -> Cost:
    """Cost of ``Entries.most_similar`` if keys lie in KV blocks: targets are copied side by side."""
    return Cost(
        numbers=(num_targets + 32) * (head_size + 2) + 3 * num_sources,
        products=num_sources * num_targets * head_size,
        touches=num_sources * num_targets + gathering((num_sources + num_targets) * head_size),
    )


def attending(num_entries: int, num_queries: int, group_size: int) -> int:
    """Numbers held while queries attend to all entries, in groups that fit in the processor's caches."""
    group = max(1, MAX_ATTENTION_BYTES // (4 * group_size * num_entries))
    return 3 * min(num_queries, group) * group_size * num_entries


@dataclass(frozen=True)
class Rates:
    """Work that a device does per second, by the kinds that a ``Cost`` counts. comparisons_per_second and
    projections_per_second: None: as many as products."""

    products_per_second: float
    touches_per_second: float
    comparisons_per_second: float | None = None
    projections_per_second: float | None = None


def measure_rates(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Rates:
    """Measures the rates of ``device`` in float32, but for projections of a model in ``dtype``, as when nothing else
    runs on it.

    Takes the fastest of many short runs, some 100 ms in all, since the machine may be busy while it starts. On the CPU
    they run on one core, because threads that wait for each other on a busy machine measure nothing; half of PyTorch's
    threads are assumed to help. The element-wise pass takes exponentials, because hardly any part is limited by memory
    alone.
    """
    one, other = torch.rand(2, 256, 256, device=device)
    plane = torch.rand(1 << 16, device=device)
    keys = normalize(torch.randn(1, 1024, 64, device=device), dim=-1)
    values, weights = torch.rand(1, 256, 64, device=device), torch.rand(1, 1, 512, 64, device=device)
    values, weights = values.to(dtype).float(), weights.to(dtype)  # as they are read from the cache
    n, d = keys.shape[1:]
    found = torch.full((1, n), -1, device=device)
    with _one_thread(one.device) as num_threads:
        products = _seconds(lambda: one @ other, one.device)
        passes = _seconds(lambda: plane.exp(), plane.device)
        searches = _seconds(lambda: newest_repeats(keys, 1.0, found.fill_(-1), 0, n), keys.device)
        projections = _seconds(lambda: projected_norms(values, weights), values.device)
    work = len(one) ** 3 / products, 2 * len(plane) / passes, n * n // 2 * d / searches
    helping = max(1.0, num_threads / 2)
    return Rates(*(helping * one for one in (*work, values.shape[1] * weights.numel() / projections)))


@contextmanager
def _one_thread(device: torch.device) -> Iterator[int]:
    """Runs PyTorch's CPU operators on one thread; yields the usual number of threads, 1 for a GPU."""
    if device.type != "cpu":
        yield 1
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(num_threads)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Shortest of the runs that fit in ``MEASURING_SECONDS``, of at least ten, after three warm-up runs."""
    best, num_runs, until = float("inf"), 0, perf_counter() + MEASURING_SECONDS
    while num_runs < 13 or perf_counter() < until:
        started = perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        num_runs += 1
        if num_runs > 3:
            best = min(best, perf_counter() - started)
    return best
