"""Executes compression plans: gathers a request's live entries, asks its policy, writes the result back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vllm_kvmerge.attention.backend import PromptScores, QueryRing
from vllm_kvmerge.cache.plan import CompressionPlan
from vllm_kvmerge.config import CompressionConfig
from vllm_kvmerge.kernels import Pages, gather_entries, write_front
from vllm_kvmerge.policies import CompressionContext, Entries


@dataclass(frozen=True)
class Compactor:
    """Compresses requests' caches, layer by layer.

    layers: each layer's pages. scale: of the attention logits. head_indices: index of each of this worker's KV heads
    among all of them. all_heads: gathers ``[H, ...]`` from all tensor-parallel workers. output_weights: gives a layer's
    output projection as ``[H, G, hidden, d]`` float32, or None where it is not known.
    """

    layers: Sequence[Pages]
    scale: float
    head_indices: list[int]
    all_heads: Callable[[Tensor], Tensor] = field(default=lambda tensor: tensor)
    output_weights: Callable[[int], Tensor | None] = field(default=lambda layer: None)

    def run(
        self,
        plan: CompressionPlan,
        config: CompressionConfig,
        source_blocks: Tensor,
        prompt_scores: PromptScores | None = None,
        ring: QueryRing | None = None,
    ) -> tuple[int, int]:
        """Runs ``plan`` on every layer; returns the numbers of merged and evicted entries, over layers and heads.

        source_blocks: ids of the blocks that the request's slots lie in before the plan. prompt_scores: statistics of
        its tokens if this is its first compression and its policy scores the prompt. ring: its newest queries if its
        policy reads them.
        """
        policy = config.policy
        base = CompressionContext(
            budget=plan.budget,
            capacity=plan.new_front,
            num_tokens=plan.num_tokens,
            at_prompt_end=plan.front == 0,
            num_layers=len(self.layers),
            scale=self.scale,
            all_heads=self.all_heads,
            head_indices=self.head_indices,
        )
        if ring is not None:
            base = replace(base, query_positions=ring.positions(plan.num_tokens))
        contexts = [self._layer_context(base, layer, config, ring) for layer in range(len(self.layers))]
        if policy.allocator.has_layer_statistic:
            statistics = []
            for layer, context in enumerate(contexts):
                entries = self._gather(layer, plan, source_blocks, prompt_scores)
                statistics.append(policy.layer_statistic(entries, context))
            contexts = [replace(context, layer_statistics=torch.stack(statistics)) for context in contexts]
        destination = torch.tensor(plan.blocks)
        num_merged = num_evicted = 0
        for layer, context in enumerate(contexts):
            result = policy.compress(self._gather(layer, plan, source_blocks, prompt_scores), context)
            write_front(self.layers[layer], destination, result.entries)
            num_merged += result.num_merged
            num_evicted += result.num_evicted
        return num_merged, num_evicted

    def _layer_context(
        self, base: CompressionContext, layer: int, config: CompressionConfig, ring: QueryRing | None
    ) -> CompressionContext:
        return replace(
            base,
            layer=layer,
            queries=None if ring is None else ring.queries(layer, base.num_tokens, len(self.head_indices)),
            output_weights=self.output_weights(layer) if config.policy.needs_output_weights else None,
        )

    def _gather(
        self, layer: int, plan: CompressionPlan, source_blocks: Tensor, prompt_scores: PromptScores | None
    ) -> Entries:
        entries = gather_entries(self.layers[layer], source_blocks, plan.front, plan.tail, plan.num_tokens)
        if plan.front == 0:
            # Before its first compression a request's pages hold no statistics of its own.
            entries.scores.zero_()
            entries.aux.zero_()
            if prompt_scores is not None:
                entries.scores.copy_(prompt_scores.scores[layer, :, : plan.num_tokens])
                entries.aux.copy_(prompt_scores.aux[layer, :, : plan.num_tokens])
        return entries
