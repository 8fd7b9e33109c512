"""The policy of requests that name none: the best that has been measured for their case (docs/leaderboard.md)."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from vllm_kvmerge.ops.tables import read_table
from vllm_kvmerge.policies.allocators import Uniform

TABLE = Path(__file__).with_name("recommended.json")


class Measured(BaseModel):
    """A policy's figures in one case. needs: what not every server has; None: nothing. score: mean and its 95%
    interval, by budget. held: bytes of the cache, of the full one's, by budget. first_token: seconds to it, over a
    plain request's, where a context is compressed before its question. text: perplexity of plain text with the
    full cache, over that with the policy, by budget. overall: what ranks, mean of all tasks at one budget."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    parameters: dict[str, Any]
    uneven: bool
    needs: str | None
    score: dict[str, tuple[float, float, float]]
    held: dict[str, float]
    first_token: float
    text: dict[str, float]
    overall: float


class Recommendations(BaseModel):
    """What decides. samples: prompts of each task. budget: that ranks. cases: the best policies of each, best first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int
    budget: float
    cases: dict[str, list[Measured]]
    machine: dict[str, Any]

    def best(self, case: str) -> Measured:
        """Of the policies that every server can run."""
        return next(one for one in self.cases[case] if one.needs is None)


@cache
def recommendations() -> Recommendations:
    """The table. Raises ValueError, which names its file, if that is missing or broken."""
    return read_table(TABLE, TypeAdapter(Recommendations))


def case_of(data: Mapping[str, Any]) -> str:
    """The case that a request's ``kv_compression`` is: whether its question comes later, and whether heads may have
    budgets of their own."""
    contexts = (data.get("context_tokens"), data.get("context_messages"))
    later = "seen" if contexts == (None, None) else "unseen"
    return f"{later}, {'even' if data.get('allocator') == Uniform.name else 'uneven'}"


def with_policy(data: Mapping[str, Any]) -> dict[str, Any]:
    """``data``, which names no policy, with the best one for its case. What follows a context is kept whole."""
    case = case_of(data)
    decode = {"decode": "grow"} if case.startswith("unseen") else {}
    return {**decode, **recommendations().best(case).parameters, **data}
