"""Selector that combines the rankings of several others."""

from typing import Annotated, Literal

import torch
from pydantic import Field, WithJsonSchema
from torch import Tensor

from vllm_kvmerge.policies.base import CompressionContext, Entries, HeadShape, Selector
from vllm_kvmerge.policies.indexing import inverse, top
from vllm_kvmerge.policies.registry import register
from vllm_kvmerge.policies.selectors.expected_attention import ExpectedAttention
from vllm_kvmerge.policies.selectors.keydiff import KeyDiff
from vllm_kvmerge.policies.selectors.knorm import KeyNorm
from vllm_kvmerge.policies.selectors.leverage import Leverage
from vllm_kvmerge.policies.selectors.ranked import RankedSelector
from vllm_kvmerge.policies.selectors.recent_queries import RecentQueries
from vllm_kvmerge.policies.selectors.rkv import RedundancyAware
from vllm_kvmerge.policies.selectors.top_scores import TopScores
from vllm_kvmerge.policies.selectors.value_leverage import ValueLeverage
from vllm_kvmerge.policies.selectors.window_topk import WindowTopK
from vllm_kvmerge.policies.tiles import in_tiles

Member = Literal[
    "compactor", "expected_attention", "keydiff", "knorm", "morphkv", "rkv", "snapkv", "top_scores", "value_leverage"
]
"""Selectors that rank each head's entries by themselves."""


def _object(selector: type[Selector]) -> WithJsonSchema:
    """The schema in full: parts are described without definitions that it could refer to."""
    return WithJsonSchema(selector.model_json_schema() | {"description": "Parameters of this member."})


@register
class Fused(Selector):
    """The rankings of several selectors, its members, combined head by head.

    A member's rank of an entry is its place in the order in which the member would keep the head's entries; so members'
    scores need no common unit. ``max_rank`` keeps the entries whose best rank is highest, ``sum_rank`` those whose mean
    rank is (Borda count). With ``shares``, members in turn take equal shares of the budget, from what others have left.

    What any member protects stays. A member's parameters are given under its name. Allocators compare the scores of the
    first member that has its own (``has_mass``), otherwise the tracker's.
    """

    name = "fused"
    source = "Borda count, and others, of the members' rankings"
    needs_scores = False
    takes_shares = True

    of: list[Member] = Field(
        ["expected_attention", "compactor"],
        min_length=2,
        max_length=8,
        description="Selectors whose rankings are fused.",
    )
    by: Literal["max_rank", "sum_rank", "shares"] = Field("max_rank", description="How rankings are fused.")
    compactor: Annotated[Leverage, _object(Leverage)] = Leverage.model_construct()
    expected_attention: Annotated[ExpectedAttention, _object(ExpectedAttention)] = ExpectedAttention.model_construct()
    keydiff: Annotated[KeyDiff, _object(KeyDiff)] = KeyDiff.model_construct()
    knorm: Annotated[KeyNorm, _object(KeyNorm)] = KeyNorm.model_construct()
    morphkv: Annotated[RecentQueries, _object(RecentQueries)] = RecentQueries.model_construct()
    rkv: Annotated[RedundancyAware, _object(RedundancyAware)] = RedundancyAware.model_construct()
    snapkv: Annotated[WindowTopK, _object(WindowTopK)] = WindowTopK.model_construct()
    top_scores: Annotated[TopScores, _object(TopScores)] = TopScores.model_construct()
    value_leverage: Annotated[ValueLeverage, _object(ValueLeverage)] = ValueLeverage.model_construct()

    @property
    def members(self) -> "tuple[RankedSelector | WindowTopK, ...]":
        return tuple(getattr(self, name) for name in self.of)

    @property
    def needs_rotation(self) -> bool:  # type: ignore[override]
        return any(member.needs_rotation for member in self.members)

    @property
    def has_mass(self) -> bool:  # type: ignore[override]
        return any(member.has_mass for member in self.members)

    @property
    def takes_cap(self) -> bool:
        return all(member.takes_cap for member in self.members)

    @property
    def takes_sinks(self) -> bool:
        return all(member.takes_sinks for member in self.members)

    @property
    def query_window(self) -> int:
        return max(member.query_window for member in self.members)

    @property
    def min_budget(self) -> int:
        return 1 + sum(member.min_budget - 1 for member in self.members)

    def protected(self, entries: Entries, context: CompressionContext) -> Tensor:
        return torch.stack([member.protected(entries, context) for member in self.members]).any(0)

    def mass(self, entries: Entries, context: CompressionContext) -> Tensor:
        return next(member for member in self.members if member.has_mass).mass(entries, context)

    def select(self, entries: Entries, importance: Tensor, protected: Tensor, context: CompressionContext) -> Tensor:
        members, counts, chosen = self.members, context.counts, protected
        rankings = in_tiles(
            len(members), lambda number: members[number].ranking(entries, importance, protected, context)
        )
        if self.by == "shares":
            num_protected = protected.sum(1)
            for number, ranking in enumerate(rankings, 1):
                taken = num_protected + (counts - num_protected) * number // len(rankings)
                chosen = top(ranking, chosen & entries.is_live, entries, taken)
            return chosen
        ranks = torch.stack([ranks_of(ranking, entries.is_live & ~protected) for ranking in rankings])
        fused = ranks.amin(0) if self.by == "max_rank" else ranks.sum(0)
        return top(-fused.to(entries.scores.dtype), protected, entries, counts)

    def held(self, shape: HeadShape) -> int:
        return max(member.held(shape) for member in self.members)


def ranks_of(ranking: Tensor, counted: Tensor) -> Tensor:
    """``[H, n]`` int64: each entry's place in descending order of ``ranking`` (``[H, n]`` floating point); those not
    ``counted`` (``[H, n]`` bool) come last. Ties: lower index first."""
    finite = ranking.nan_to_num(nan=torch.finfo(ranking.dtype).min).masked_fill(~counted, -torch.inf)
    return inverse(finite.argsort(dim=1, descending=True, stable=True), ranking.shape[1])
