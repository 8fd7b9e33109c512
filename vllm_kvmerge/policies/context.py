"""Inputs of a policy besides the entries: rows, sizes, queries, weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vllm_kvmerge.ops import PLAIN_SOFTMAX, ScoreMode, Softmax
from vllm_kvmerge.policies.entries import Entries
from vllm_kvmerge.policies.head_budgets import HeadBudgets
from vllm_kvmerge.policies.rotation import Rotation


@dataclass(frozen=True)
class Heads:
    """The ``H`` rows of a batch: this worker's KV heads of each sequence layer (one layer of one request) in turn.

    num_kv_heads: rows of each sequence layer. layers: index of each row's layer in the model. indices: index of each
    row among its layer's KV heads, counted over all tensor-parallel workers. num_layers: layers of the model.
    gather: returns ``[num_kv_heads, ...]`` of all tensor-parallel workers, in the heads' order.
    """

    num_kv_heads: int
    layers: list[int]
    indices: list[int]
    num_layers: int
    gather: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, layers: list[int], indices: list[int], num_layers: int, gather: Callable[[Tensor], Tensor]) -> "Heads":
        """The heads ``indices`` of sequence layers; ``layers``: the layer of each."""
        rows = [layer for layer in layers for _ in indices]
        return cls(len(indices), rows, indices * len(layers), num_layers, gather)

    def by_sequence_layer(self, tensor: Tensor) -> Tensor:
        """``[H, ...]`` as ``[sequence layers, num_kv_heads, ...]``."""
        return tensor.unflatten(0, (-1, self.num_kv_heads))

    def of_all_workers(self, tensor: Tensor) -> Tensor:
        """``[H, ...]`` to ``[sequence layers, heads, ...]``, with the heads of all tensor-parallel workers.

        Every worker must call it equally often, so trackers, allocators and selectors may, but not depending on data.
        """
        return self.gather(self.by_sequence_layer(tensor).transpose(0, 1)).transpose(0, 1)

    def of_rows(self, rows: list[int]) -> "Heads":
        """Some of the rows; if they are not whole sequence layers, each counts as one."""
        size = self.num_kv_heads
        sequence_layers = dict.fromkeys(row // size for row in rows)
        whole = [row for one in sequence_layers for row in range(one * size, (one + 1) * size)]
        return replace(
            self,
            num_kv_heads=size if rows == whole else 1,
            layers=[self.layers[row] for row in rows],
            indices=[self.indices[row] for row in rows],
        )


@dataclass(frozen=True)
class Queries:
    """The newest queries of each row's request, oldest first.

    kept: ``[H, G, w, d]`` in the model's dtype, of the G query heads that share the KV head. positions: ``[H, w]``
    int64, of their tokens.
    """

    kept: Tensor
    positions: Tensor

    @cached_property
    def vectors(self) -> Tensor:
        """``kept`` in float32, or more."""
        return self.kept.to(torch.promote_types(self.kept.dtype, torch.float32))

    def newest(self, count: int) -> "Queries":
        """The newest ``count``, or as many as there are."""
        return Queries(self.kept[:, :, -count:], self.positions[:, -count:])

    def of_rows(self, rows: list[int]) -> "Queries":
        return Queries(self.kept[rows], self.positions[rows])


@dataclass(frozen=True)
class CompressionContext:
    """All that a policy knows besides the entries. ``H``: sequence layers x KV heads, see ``Heads``.

    budget: entries to keep per head, on average over layers and heads; selectors and mergers see the largest of their
    rows.
    capacity: entries to return per head, dead ones included.
    num_tokens: tokens computed so far, thus the next token's position; that of the longest of several requests.
    at_prompt_end: true for a request's first compression.
    heads: the rows that are compressed. scale: factor of the attention logits. softmax: what else the model does with
    them, for parts that take it (``Part.takes_cap``, ``Part.takes_sinks``).
    min_budget: fewest entries that an allocator may give a head; set by the composition.
    budgets: ``[H]`` int64 on the CPU, live entries that each row may keep; None: the allocator is asked. Selectors and
    mergers see them on the entries' device, all alike unless both parts ``takes_shares``.
    is_packed: each row's entries lie in as many first places as its budget; otherwise anywhere in ``capacity``.
    num_slots: entries of each row's budget that the merger fills itself; set by the composition.
    tracker_mode: what the entries' statistics are; set by the composition.
    queries: the newest queries, if the policy reads some (``query_window``) and they are known.
    output_weights: ``[H, G, hidden, d]`` in the model's dtype, each query head's part of the output projection, if the
    policy reads it and it is known.
    rotation: the model's rotary position embedding, if it has one that is known.
    head_budgets: what is known beforehand of the budgets of the model's heads, if anything is.
    layer_statistics: ``[sequence layers, num_layers]`` float32, the allocator's ``layer_statistic`` of every layer of
    the request, if it has one and all layers are compressed.
    end: tokens that the entries stand for, where they are not all: a refresh may leave the newest as they are.
    most_bytes: of tensors that another package's part may hold while it works; None: no limit.
    """

    budget: int
    capacity: int
    num_tokens: int
    at_prompt_end: bool
    heads: Heads
    scale: float = 1.0
    softmax: Softmax = PLAIN_SOFTMAX
    min_budget: int = 0
    budgets: Tensor | None = None
    is_packed: bool = False
    num_slots: int = 0
    tracker_mode: ScoreMode = ScoreMode.NONE
    queries: Queries | None = None
    output_weights: Tensor | None = None
    rotation: Rotation | None = None
    head_budgets: HeadBudgets | None = None
    layer_statistics: Tensor | None = None
    end: int | None = None
    most_bytes: int | None = None

    @classmethod
    def of_layer(
        cls, entries: Entries, budget: int, num_tokens: int, at_prompt_end: bool, *, layer: int = 0, **fields: Any
    ) -> "CompressionContext":
        """The context of one layer of one request on one worker. ``fields``: the others; ``capacity`` defaults to the
        budget, and ``num_layers``, of the model, to 1."""
        indices, num_layers = list(range(entries.num_rows)), fields.pop("num_layers", 1)
        heads = Heads.of([layer], indices, num_layers, gather=lambda tensor: tensor)
        capacity = fields.pop("capacity", budget)
        return cls(budget, capacity, num_tokens, at_prompt_end, heads, **fields)

    def known_rotation(self) -> Rotation:
        """``rotation``. Raises ValueError if it is not known."""
        if self.rotation is None:
            raise ValueError("the model's rotary position embedding is not known")
        return self.rotation

    def known_head_budgets(self) -> HeadBudgets:
        """``head_budgets``. Raises ValueError if they are not known."""
        if self.head_budgets is None:
            raise ValueError("the budgets of the model's heads are not known")
        return self.head_budgets

    @property
    def num_covered(self) -> int:
        """Tokens that the entries stand for."""
        return self.num_tokens if self.end is None else self.end

    @property
    def num_kept(self) -> int:
        """The most entries that the selector keeps of a row."""
        return self.budget - self.num_slots

    @cached_property
    def counts(self) -> Tensor:
        """``[H]`` int64: entries that the selector keeps of each row."""
        assert self.budgets is not None
        return self.budgets - self.num_slots if self.num_slots else self.budgets

    def of_rows(self, rows: list[int]) -> "CompressionContext":
        """The context of some of the rows, but for ``budgets``."""
        if len(rows) == len(self.heads.layers):
            return self
        weights = self.output_weights
        if weights is not None:  # rows that follow one another need no copy
            is_range = rows == list(range(rows[0], rows[0] + len(rows)))
            weights = weights[rows[0] : rows[0] + len(rows)] if is_range else weights[rows]
        return replace(
            self,
            heads=self.heads.of_rows(rows),
            softmax=self.softmax.of_heads(rows),
            queries=None if self.queries is None else self.queries.of_rows(rows),
            output_weights=weights,
            layer_statistics=None,
        )
