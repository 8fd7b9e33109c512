"""Merger that hands an evicted entry's value to its neighbour (WeightedKV)."""

from torch import Tensor

from vllm_kvmerge import ops
from vllm_kvmerge.policies.base import CacheUpdate, CompressionContext, Entries, Merger, ScoreMode
from vllm_kvmerge.policies.indexing import by_position, inverse
from vllm_kvmerge.policies.registry import register


@register
class NeighbourValueMerger(Merger):
    """Drops keys and merges values into the next entry to the right, by position (WeightedKV section IV, algorithm 1).

    One after the other, the smallest mean score m first, the entries e that leave give their values to whichever entry
    c is then their right neighbour, which may itself be about to leave:

        v_c <- (m_e v_e + m_c v_c) / (m_e + m_c)

    c keeps its key, its position, its votes and its m. The ``sum`` tracker's accumulated scores serve as m likewise. An
    entry that attention has not used has no weight. An entry without a right neighbour is lost, which only happens if
    the selector does not keep the newest.
    """

    name = "neighbour_value"
    source = "WeightedKV, arXiv:2503.01330"
    tracker_modes = frozenset({ScoreMode.MEAN, ScoreMode.SUM})

    def merge(
        self, entries: Entries, kept: Tensor, importance: Tensor, protected: Tensor, context: CompressionContext
    ) -> CacheUpdate:
        n = len(entries)
        # Of the entries that stay only those take part that follow one that leaves: few, except at the prompt's end.
        index, target, shares, places, merged = ops.hand_over(
            by_position(entries), inverse(kept, n), entries.is_live, importance, min(n, 2 * (n - kept.shape[1]))
        )
        values = entries.mixed("values", index, target, shares, None)
        return CacheUpdate.of(entries, kept).write(places, None, values, merged)
