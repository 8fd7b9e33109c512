"""Selector that keeps the entries that the newest query attends to, the same for all heads of a layer."""

from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, Entries
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.ranked import RankedSelector


@register
class Tova(RankedSelector):
    """Token omission via attention (TOVA): the attention probability averaged over the layer's heads.

    The probability is the newest query's where the tracker forgets all others (``sum`` with ``decay`` 0, as in the
    preset), and summed over the query heads of each KV head. All heads, on all tensor-parallel workers, keep the same
    entries, so entry i is the same token in each. An entry that is dead in some heads counts as 0 there.
    """

    name = "tova"
    source = "TOVA, arXiv:2401.06104"
    needs_scores = True
    needs_probabilities = True
    pools_heads = True

    def ranking(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        pooled = context.heads.of_all_workers(importance.masked_fill(~entries.is_live, 0.0)).mean(dim=1, keepdim=True)
        return pooled.expand_as(context.heads.by_sequence_layer(importance)).flatten(0, 1)
