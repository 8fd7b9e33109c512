"""Fields of a request that every policy has, besides its parts' names and hyper-parameters."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, WithJsonSchema

from vllm_kvmerge.ops.coded import Coding
from vllm_kvmerge.policies.base import MAX_QUERIES, MAX_TOKENS
from vllm_kvmerge.policies.protection import TokenRanges, disjoint

DecodeMode = Literal["bounded", "grow"]
Positions = Literal["text", "cache"]
Trigger = Literal["budget", "pressure"]


def _check_budget(budget: int | float) -> int | float:
    if 1 <= budget <= MAX_TOKENS if isinstance(budget, int) else 0.0 < budget <= 1.0:
        return budget
    raise ValueError(
        f"must be an integer from 1 to {MAX_TOKENS} (entries per KV head) or a float in (0, 1] (share of the prompt's "
        "tokens)"
    )


class ThresholdBudget(BaseModel):
    """A budget that depends on the scores: short for the allocator ``threshold`` with ``max`` as its budget."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    threshold: float = Field(gt=0.0, le=1.0)
    max: Annotated[StrictInt | StrictFloat, AfterValidator(_check_budget)]


Count = Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]

_SHARE = {"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0}
_COUNT_OR_SHARE = [{"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}, _SHARE]

Budget = Annotated[
    StrictInt | StrictFloat,
    AfterValidator(_check_budget),
    WithJsonSchema(
        {
            "anyOf": [
                *_COUNT_OR_SHARE,
                {
                    "type": "object",
                    "properties": {"threshold": _SHARE, "max": {"anyOf": _COUNT_OR_SHARE}},
                    "required": ["threshold", "max"],
                    "additionalProperties": False,
                },
            ],
            "description": "Integer >= 1: entries per KV head. Float in (0, 1]: share of the prompt's tokens, or of "
            "the context's if context_tokens or context_messages is given, rounded up. Object: each KV head keeps the "
            "entries with more than threshold of its attention, at most max (an integer or float as above) on average.",
        }
    ),
]


class Refresh(BaseModel):
    """Periodic compression of the complete cache (KeepKV section 1), which is kept outside the pool for it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    every: int = Field(ge=1, le=MAX_TOKENS, description="Tokens from one refresh to the next.")
    queries: int = Field(
        32, ge=1, le=MAX_QUERIES, description="Number of the newest tokens scored as queries at a refresh."
    )


class Prefill(BaseModel):
    """Compression of the context while it is being computed, so that it need not fit into the cache."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    chunk: int = Field(ge=1, le=MAX_TOKENS, description="Tokens beyond the budget that trigger a compression.")


def _check_range(tokens: tuple[int, int]) -> tuple[int, int]:
    if tokens[0] < tokens[1]:
        return tokens
    raise ValueError("a range must end after its start")


Position = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)]

MAX_RANGES = 64
"""Most ranges, and most messages, that a request may protect."""


class Protect(BaseModel):
    """Tokens of the prompt whose entries are neither evicted nor merged.

    messages: of a chat, each by its role or its index. A server puts the ranges of their tokens in their place.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: tuple[Annotated[tuple[Position, Position], AfterValidator(_check_range)], ...] = Field(
        (), max_length=MAX_RANGES, description="Ranges [start, end) of the prompt's tokens."
    )
    messages: tuple[Annotated[StrictInt, Field(ge=0)] | StrictStr, ...] = Field(
        (), max_length=MAX_RANGES, description="Messages of a chat request, each by its role or its index from 0."
    )

    @property
    def ranges(self) -> TokenRanges:
        return disjoint(self.tokens)


class CommonFields(BaseModel):
    """The size and the times of a request's compressions."""

    model_config = ConfigDict(frozen=True)

    budget: Budget = 0.2
    interval: Count | None = Field(
        None,
        description="Entries above the budget that trigger a compression; default: one block. With trigger pressure: "
        "entries by which the cache must grow before it is compressed again; default: a quarter of the budget.",
    )
    decode: DecodeMode = Field(
        "bounded",
        description="bounded: compress again whenever the cache exceeds the budget by the interval. grow: compress "
        "once, at the end of the prompt (or context).",
    )
    front: Coding | None = Field(
        None,
        description="What is kept of the prompt (or context) is stored in fewer bits; needs decode grow. int8: with a "
        "scale for each key and value. int4: with a scale and an offset for 32 numbers. Default: in the cache's dtype.",
    )
    positions: Positions = Field(
        "text",
        description="What RoPE counts. text: tokens. cache: entries, so that a request may exceed the model's "
        "positions; each compression rotates the kept keys to their new positions.",
    )
    trigger: Trigger = Field(
        "budget",
        description="budget: compress when the cache exceeds the budget. pressure: keep all entries until the pool is "
        "short of blocks, then compress by the newest queries.",
    )
    context_tokens: Count | None = Field(
        None,
        description="Compress this many first tokens of the prompt as if they were the whole prompt, before the rest, "
        "such as a question, is read; at most the prompt's tokens. Default: the whole prompt.",
    )
    context_messages: Count | None = Field(
        None,
        description="For a chat, instead of context_tokens: this many first messages, whose tokens the server counts. "
        "Default: none.",
    )
    reuse: Literal["turns"] | None = Field(
        None,
        description="turns: when the request ends, its cache stays in the prefix cache, and a request with the same "
        "policy whose prompt begins with its tokens continues from there. Default: never.",
    )
    prefill: Prefill | None = Field(
        None,
        description="Compress the context while it is computed, whenever budget + chunk entries have accumulated, by "
        "the newest queries. Default: once, at its end.",
    )
    refresh: Refresh | None = Field(
        None,
        description="Keep the complete cache outside the pool, and recompress it by the newest queries every so many "
        "tokens. Default: never.",
    )
    protect: Protect | None = Field(
        None,
        description="Tokens of the prompt, or messages of a chat, that are neither evicted nor merged; they count "
        "towards the budget. Default: none.",
        examples=[{"tokens": [[0, 512]]}],
    )
    verify: bool = Field(
        False,
        description="Score the answer's tokens with the full cache once it has ended, and say in usage how many the "
        "full cache would have picked. Default: no.",
    )
    min_agreement: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Share of the answer's tokens that the full cache has to pick too. If it picks fewer, the answer "
        "is made again without compression. Implies verify; for greedy decoding without a stream. Default: none.",
    )
