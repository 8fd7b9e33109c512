"""The report of what compression did for a request, ``usage.kv_compression`` in its response."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

PROOFS_KEY = "kv_compression"
"""Key of a request's proofs, a list with one for each sequence, in the ``kv_transfer_params`` that schedulers give it;
servers move them to ``usage``."""


class EntriesKept(BaseModel):
    """Entries per KV head after the newest compression, over all compressed layers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: float
    least: int | None = Field(description="In one head; null: not known, of a context that was loaded from a file.")
    most: int | None = Field(description="As `least`.")


class BytesHeld(BaseModel):
    """Bytes of the blocks that the request held, over all layers and ranks; a block that requests share counts for
    each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    end: int = Field(description="When the request ended.")
    peak: int = Field(description="The most at any time.")


class Verified(BaseModel):
    """An answer's tokens, as the full cache would continue prompt and answer before each of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int = Field(description="Tokens of the answer that were compared.")
    agreeing: float | None = Field(
        description="Share of them that the full cache would have picked, up to rounding; null: they were sampled."
    )
    log_prob_change: float | None = Field(
        description="Mean over them of log p with the compressed cache, less log p with the full one; null: the server "
        "reports log-probabilities of another kind."
    )
    first_difference: int | None = Field(
        description="Index of the first token that the full cache would not have picked; null: there is none."
    )
    fallback: bool = Field(
        default=False,
        description="Fewer than `min_agreement` agreed, and the answer was made again without compression.",
    )
    tokens_computed: int = Field(description="Tokens of prompt and answer that were computed for it.")
    skipped: str | None = Field(
        None,
        description="Why nothing was compared. `no_room`: users left none in time. `too_long`: more tokens than "
        "`verify_max_tokens`. `unsupported`: embeddings, images in shared memory. `unknown`: nothing was generated, "
        "or the engine does not know the request any more.",
    )

    @classmethod
    def of(cls, found: Mapping[str, Any], log_probs: Sequence[float], is_sampled: bool) -> "Verified":
        """That of one sequence. found: by the engine (``Verifications.ask``). log_probs: of its tokens with the
        compressed cache; empty: not known."""
        skipped: str | None = found.get("skipped")
        agrees: list[bool] = found.get("agrees", [])
        count, change = len(agrees), None
        if count and len(log_probs) == count:
            change = sum(a - b for a, b in zip(log_probs, found["log_probs"], strict=True)) / count
        return cls(
            tokens=count,
            agreeing=sum(agrees) / count if count and not is_sampled else None,
            log_prob_change=change,
            first_difference=None if is_sampled or all(agrees) else agrees.index(False),
            tokens_computed=found.get("tokens", 0) if not skipped else 0,
            skipped=skipped,
        )

    @classmethod
    def of_all(cls, parts: "Sequence[Verified]") -> "Verified":
        """That of an answer with several sequences."""
        count = sum(one.tokens for one in parts)

        def mean(name: str) -> float | None:
            values = [(getattr(one, name), one.tokens) for one in parts if one.tokens]
            known = bool(values) and all(value is not None for value, _ in values)
            return sum(value * tokens for value, tokens in values) / count if known else None

        places = [one.first_difference for one in parts if one.first_difference is not None]
        return cls(
            tokens=count,
            agreeing=mean("agreeing"),
            log_prob_change=mean("log_prob_change"),
            first_difference=min(places, default=None),
            tokens_computed=sum(one.tokens_computed for one in parts),
            fallback=any(one.fallback for one in parts),
            skipped=next((one.skipped for one in parts if one.skipped), None),
        )


class Tried(BaseModel):
    """A budget that was tried for a context."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_compression: dict[str, Any] = Field(description="What the context was compressed by.")
    verified: Verified = Field(description="Of the answers to all probes.")


class Chosen(BaseModel):
    """How the budget of a context was chosen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_agreement: float = Field(description="As asked for.")
    budget: float | None = Field(description="The smallest that passed; null: none, and the context is not compressed.")
    tried: list[Tried] = Field(description="The cheapest policy and the largest budget first.")


class CompressionProof(BaseModel):
    """What compression did for a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str = Field(description="Its name; `full`: none.")
    parameters: dict[str, Any] = Field(description="The field with every default spelled out.")
    sequences: int = Field(default=1, description="Sequences of the answer, over which numbers add up.")
    budget: int | None = Field(description="Entries per KV head that were asked for, on average; null: no limit.")
    tokens: int = Field(description="Tokens of prompt and answer that the cache stands for.")
    entries: EntriesKept = Field(description="After the newest compression; without one, all tokens.")
    bytes: BytesHeld = Field(description="Bytes of the blocks held.")
    blocks_returned: int = Field(description="Blocks that compressions gave back to the pool.")
    compressions: int = Field(description="How often the cache was compressed.")
    merged: int = Field(description="Entries merged into others, over layers and KV heads.")
    evicted: int = Field(description="Entries dropped, over layers and KV heads.")
    reused_tokens: int = Field(description="Tokens of a context that was found compressed.")
    notes: list[str] = Field(description="What differs from what was asked for, or why nothing was compressed.")
    verified: Verified | None = Field(None, description="Of a request with `verify`.")
    chosen: Chosen | None = Field(None, description="Of a request with budget `auto`.")

    @classmethod
    def of_all(cls, proofs: "Sequence[CompressionProof]") -> "CompressionProof":
        """That of an answer with several sequences, which all asked for the same."""
        if len(proofs) == 1:
            return proofs[0]
        sums = ("tokens", "blocks_returned", "compressions", "merged", "evicted", "reused_tokens")
        entries, held = [proof.entries for proof in proofs], [proof.bytes for proof in proofs]
        update: dict[str, Any] = {name: sum(getattr(proof, name) for proof in proofs) for name in sums}
        update["sequences"] = len(proofs)
        update["entries"] = EntriesKept(
            mean=sum(one.mean for one in entries) / len(entries),
            least=min((one.least for one in entries if one.least is not None), default=None),
            most=max((one.most for one in entries if one.most is not None), default=None),
        )
        update["bytes"] = BytesHeld(end=sum(one.end for one in held), peak=sum(one.peak for one in held))
        update["notes"] = list(dict.fromkeys(note for proof in proofs for note in proof.notes))
        return proofs[0].model_copy(update=update)
