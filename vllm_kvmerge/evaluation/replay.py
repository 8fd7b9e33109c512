"""Traced documents on compressed caches: keys and values go through caches and policies as in serving."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvmerge.engine.attention.rows import PromptScores, QueryRing
from vllm_kvmerge.engine.plan import CompressionPlan
from vllm_kvmerge.engine.worker.compactor import Compaction, Compactor
from vllm_kvmerge.engine.worker.compression import score_update
from vllm_kvmerge.engine.worker.external import ExternalCache
from vllm_kvmerge.evaluation.trace import LayerTrace
from vllm_kvmerge.ops import (
    NO_UPDATE,
    AttentionBatch,
    PagedKVCache,
    cell_bytes,
    paged_attention,
    score_prompt_queries,
    write_tokens,
)
from vllm_kvmerge.request.parameters import CompressionConfig

BLOCK_SIZE = 32


class TracedSequence:
    """One document's keys and values in a cache of its own, computed token by token as a server would."""

    def __init__(self, layers: list[LayerTrace], dtype: torch.dtype) -> None:
        self.layers, self.dtype = layers, dtype
        num_tokens, num_kv_heads, head_size = layers[0].keys.shape
        shape = (-(-num_tokens // BLOCK_SIZE), num_kv_heads, BLOCK_SIZE, cell_bytes(head_size, dtype) // dtype.itemsize)
        self.caches = [PagedKVCache.of(torch.zeros(shape, dtype=dtype), head_size) for _ in layers]
        self.blocks = torch.arange(shape[0], dtype=torch.int32)
        self.num_tokens = self.front = self.tail = 0
        self.complete: ExternalCache | None = None
        self.compactor = Compactor(
            self.caches,
            layers[0].scale,
            list(range(num_kv_heads)),
            output_weights=lambda i: layers[i].output_weights,
            rotation=layers[0].rotation,
        )

    def write(self, count: int) -> slice:
        """Stores the keys and values of the next ``count`` tokens; returns which they are."""
        new = slice(self.num_tokens, self.num_tokens + count)
        slots = torch.arange(new.start, new.stop)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            write_tokens(cache, slots, layer.keys[new].to(self.dtype), layer.values[new].to(self.dtype))
        self.num_tokens = new.stop
        return new

    def attend(self, new: slice, config: CompressionConfig | None = None) -> list[Tensor]:
        """Each layer's attention output for these newest tokens, ``[q, H * G, d]``; scores as the policy keeps them."""
        tracked = config is not None and config.tracks_decode and self.front > 0
        update = score_update(config) if tracked and config is not None else NO_UPDATE
        count = new.stop - new.start
        batch = AttentionBatch.single(self.blocks, count, self.num_tokens, self.front, self.tail, update)
        outputs = []
        for layer, cache in zip(self.layers, self.caches, strict=True):
            query = layer.queries[new].to(self.dtype)
            outputs.append(torch.empty_like(query))
            paged_attention(query, cache, batch, layer.scale, outputs[-1])
        return outputs

    def compress(self, config: CompressionConfig, budget: int, is_refresh: bool = False) -> None:
        """Compresses the cache to ``budget`` entries, in the blocks where it lies; a refresh starts from all tokens."""
        covered = self.num_tokens if config.decode == "bounded" or self.front == 0 else self.tail
        capacity = config.policy.capacity(budget)
        num_entries = covered if is_refresh else self.front + covered - self.tail
        new_front = num_entries if capacity is None else min(num_entries, capacity)
        plan = CompressionPlan(
            request_id="",
            compression="",
            front=self.front,
            tail=self.tail,
            num_tokens=covered,
            budget=budget,
            new_front=new_front,
            blocks=self.blocks[: -(-new_front // BLOCK_SIZE)].tolist(),
            is_refresh=is_refresh,
            num_computed=self.num_tokens,
        )
        ring = self._ring(config.policy.query_window)
        compaction = Compaction(plan, config.policy, self.blocks, self._prompt_scores(config), ring)
        if config.refresh is not None:
            if self.complete is None:
                self.complete = ExternalCache.empty(self.caches, len(self.layers[0].keys))
            self.complete.append(self.caches, self.blocks, self.num_tokens, self.front)
            if is_refresh:
                ring, update = self._ring(config.refresh_window), score_update(config)
                scores = None
                if ring is not None:
                    scores = self.complete.scores(ring, config.refresh_window, update, self.layers[0].scale)
                compaction = replace(compaction, prompt_scores=scores, complete=self.complete)
        self.compactor.run([compaction])
        self.front, self.tail = new_front, covered

    def _prompt_scores(self, config: CompressionConfig) -> PromptScores | None:
        if self.front > 0 or not config.prompt_window:
            return None
        window = self.num_tokens if config.prompt_window == "all" else min(config.prompt_window, self.num_tokens)
        scores = PromptScores.empty(len(self.layers), self.layers[0].keys.shape[1], self.num_tokens)
        for index, (layer, cache) in enumerate(zip(self.layers, self.caches, strict=True)):
            query = layer.queries[self.num_tokens - window : self.num_tokens].to(self.dtype)
            statistics = scores.scores[index], scores.aux[index]
            score_prompt_queries(query, cache, self.blocks, score_update(config), layer.scale, *statistics)
        return scores

    def _ring(self, window: int) -> QueryRing | None:
        if window == 0:
            return None
        num_heads, head_size = self.layers[0].queries.shape[1:]
        ring = QueryRing.empty(len(self.layers), window, num_heads, head_size, self.dtype)
        for index, layer in enumerate(self.layers):
            newest = layer.queries[max(0, self.num_tokens - window) : self.num_tokens]
            ring.write(index, newest.to(self.dtype), self.num_tokens)
        return ring


@dataclass(frozen=True)
class Schedule:
    """A document's first ``num_prompt_tokens`` tokens are compressed, then again every ``interval`` of the next
    ``num_queries``, where the policy is bounded. dtype: of the cache."""

    num_prompt_tokens: int
    num_queries: int
    interval: int
    dtype: torch.dtype

    @property
    def queries(self) -> range:
        """Positions of the tokens whose queries are measured."""
        return range(self.num_prompt_tokens, self.num_prompt_tokens + self.num_queries)

    @property
    def counts(self) -> list[int]:
        """Numbers of tokens, one for each interval."""
        return [min(self.interval, self.num_queries - start) for start in range(0, self.num_queries, self.interval)]


def full_outputs(layers: list[LayerTrace], schedule: Schedule) -> list[list[Tensor]]:
    """For each interval each layer's attention output on the full cache, ``[q, H * G, d]``."""
    sequence = TracedSequence(layers, schedule.dtype)
    sequence.write(schedule.num_prompt_tokens)
    return [sequence.attend(sequence.write(count)) for count in schedule.counts]


def compressed_outputs(
    layers: list[LayerTrace], config: CompressionConfig, schedule: Schedule
) -> Iterator[tuple[slice, list[Tensor]]]:
    """For each interval the tokens and each layer's attention output on a compressed cache, ``[q, H * G, d]``.

    The cache as these queries saw it is compressed again only when the next interval is asked for. Refreshes come at
    ends of intervals alone. Raises ValueError if theirs is not a multiple of the schedule's.
    """
    if config.refresh is not None and config.refresh.every % schedule.interval:
        raise ValueError(f"refresh.every must be a multiple of {schedule.interval}, got {config.refresh.every}")
    budget = config.resolve_budget(schedule.num_prompt_tokens)
    sequence = TracedSequence(layers, schedule.dtype)
    sequence.write(schedule.num_prompt_tokens)
    sequence.compress(config, budget)
    for count in schedule.counts:
        new = sequence.write(count)
        yield new, sequence.attend(new, config)
        since = sequence.num_tokens - schedule.num_prompt_tokens
        if config.refresh is not None and since % config.refresh.every == 0:
            sequence.compress(config, budget, is_refresh=True)
        elif config.decode == "bounded":
            sequence.compress(config, budget)


def relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    """``[...]``: ||o' - o|| / ||o|| over the last dimension, in float32; 0 where nothing differs."""
    distance = (actual.float() - expected.float()).norm(dim=-1)
    return distance / expected.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)


def output_errors(
    layers: list[LayerTrace], config: CompressionConfig, num_prompt_tokens: int, num_queries: int, dtype: torch.dtype
) -> Iterator[float]:
    """||o' - o|| / ||o|| of each layer and each of the next ``num_queries`` queries."""
    schedule = Schedule(num_prompt_tokens, num_queries, config.interval or BLOCK_SIZE, dtype)
    yield from errors_against(full_outputs(layers, schedule), layers, config, schedule)


def errors_against(
    full: list[list[Tensor]], layers: list[LayerTrace], config: CompressionConfig, schedule: Schedule
) -> Iterator[float]:
    """``output_errors`` against ``full_outputs`` that are known."""
    for expected, (_, actual) in zip(full, compressed_outputs(layers, config, schedule), strict=True):
        for one, other in zip(actual, expected, strict=True):
            yield from relative_error(one.flatten(1), other.flatten(1)).tolist()
