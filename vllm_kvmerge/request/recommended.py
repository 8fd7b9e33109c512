"""The policy of requests that name none: the best that has been measured for their case (docs/leaderboard.md)."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from vllm_kvmerge.ops.tables import read_table
from vllm_kvmerge.policies.allocators import Uniform

TABLE = Path(__file__).with_name("recommended.json")

Case = Literal["known", "later"]
"""Whether the question is in what is compressed, or comes later."""


class Measured(BaseModel):
    """A policy's figures in one case.

    uneven: whether heads have budgets of their own. calibrated: whether these are known beforehand, as they must be.
    for_turns: whether it suits chats that go on from what their last
    turn has left (``reuse``): not if it refuses them, or the model would read all of it again every turn.
    score: share of the full cache's score and its 95% interval, by budget. held: bytes of the cache, as a share of the
    full one's, at the budget that ranks, once a context has been compressed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    parameters: dict[str, Any]
    uneven: bool
    calibrated: bool = False
    for_turns: bool
    score: dict[str, tuple[float, float, float]]
    held: float


class Recommendations(BaseModel):
    """What decides. samples: prompts of each task. budget: that ranks. cases: the best policies of each, best first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    tasks: list[str]
    samples: int
    budget: float
    cases: dict[Case, list[Measured]]

    def best(self, case: Case, even: bool = False, for_turns: bool = False, is_calibrated: bool = False) -> Measured:
        """even: of those whose heads have even budgets. for_turns: of those that suit chats. is_calibrated: where it is
        known what heads need."""
        suited = (one for one in self.cases[case] if (one.for_turns or not for_turns))
        return next(one for one in suited if not (even and one.uneven) and (is_calibrated or not one.calibrated))


@cache
def recommendations() -> Recommendations:
    """The table. Raises ValueError, which names its file, if that is missing or broken."""
    return read_table(TABLE, TypeAdapter(Recommendations))


def with_policy(data: Mapping[str, Any], is_calibrated: bool = False) -> dict[str, Any]:
    """``data``, which names no policy, with the best one for its case. What follows a context is kept whole.

    is_calibrated: whether it is known what the model's heads need. A chat that goes on from what its last turn has left
    asks later questions too.
    """
    has_context = (data.get("context_tokens"), data.get("context_messages")) != (None, None)
    is_chat = data.get("reuse") is not None
    case: Case = "later" if has_context or is_chat else "known"
    decode = {"decode": "grow"} if has_context else {}
    best = recommendations().best(case, data.get("allocator") == Uniform.name, is_chat, is_calibrated)
    return {**decode, **best.parameters, **data}
