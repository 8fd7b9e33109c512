"""Executes compression plans: gathers a request's live entries, asks its policy, writes the result back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_kvmerge.attention.backend import PromptScores
from vllm_kvmerge.cache.plan import CompressionPlan
from vllm_kvmerge.config import CompressionConfig
from vllm_kvmerge.kernels import Pages, gather_entries, write_front
from vllm_kvmerge.policies import CompressionContext


def compact(
    layers: Sequence[Pages],
    plan: CompressionPlan,
    config: CompressionConfig,
    source_blocks: Tensor,
    prompt_scores: PromptScores | None,
) -> tuple[int, int]:
    """Runs ``plan`` on every layer and returns the numbers of merged and evicted entries, over layers and heads.

    source_blocks: ids of the blocks that the request's slots lie in before the plan. prompt_scores: statistics of its
    tokens if this is its first compression and its policy scores the prompt.
    """
    destination = torch.tensor(plan.blocks)
    context = CompressionContext(budget=plan.new_front, num_tokens=plan.num_tokens, at_prompt_end=plan.front == 0)
    num_merged = num_evicted = 0
    for index, pages in enumerate(layers):
        entries = gather_entries(pages, source_blocks, plan.front, plan.tail, plan.num_tokens)
        if plan.front == 0:
            # Before its first compression a request's pages hold no statistics of its own.
            entries.scores.zero_()
            entries.aux.zero_()
            if prompt_scores is not None:
                entries.scores.copy_(prompt_scores.scores[index, :, : plan.num_tokens])
                entries.aux.copy_(prompt_scores.aux[index, :, : plan.num_tokens])
        result = config.policy.compress(entries, context)
        write_front(pages, destination, result.entries)
        num_merged += result.num_merged
        num_evicted += result.num_evicted
    return num_merged, num_evicted
