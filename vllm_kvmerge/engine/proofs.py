"""What compression did for each request, which its answer says without being asked."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm_kvmerge.engine.fronts import SharedFront
from vllm_kvmerge.engine.plan import UNCOMPRESSED, CompressionReport, HeadCounts
from vllm_kvmerge.engine.schedule import RequestCompression
from vllm_kvmerge.engine.usage import CacheSize, SizeOf, outputs_with
from vllm_kvmerge.request.parameters import FULL, CompressionConfig
from vllm_kvmerge.request.proof import PROOFS_KEY

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request


NOTED_EVERY = 16
"""Tokens after which a running request's blocks are counted again."""


@dataclass
class RequestHistory:
    """What has happened to a request so far. config: what it asks for; None: no compression. compression: that in
    numbers of tokens; None: nothing is ever compressed. budget: in entries; None: no limit. kept: what the newest
    compression came to. held: the last size that was noted, at ``noted_at`` tokens."""

    request: "Request"
    config: CompressionConfig | None
    compression: RequestCompression | None
    budget: int | None
    peak_blocks: int = 0
    blocks_returned: int = 0
    compressions: int = 0
    merged: int = 0
    evicted: int = 0
    reused_tokens: int = 0
    kept: HeadCounts | None = None
    reused_entries: int = 0
    held: CacheSize = CacheSize(0, 0, 0)
    noted_at: int = -1

    @classmethod
    def of(
        cls, request: "Request", config: CompressionConfig | None, compression: RequestCompression | None
    ) -> "RequestHistory":
        """That of a request that begins. Raises what the policy's parts raise."""
        budget = None
        if config is not None:
            budget = config.resolve_budget(config.resolve_context(request.num_prompt_tokens))
        return cls(request, config, compression, budget)

    @cached_property
    def asked(self) -> dict[str, Any]:
        """Of its proof, what does not change."""
        if self.config is None:
            return {"policy": FULL, "parameters": {"policy": FULL}, "sequences": 1, "budget": None}
        return {
            "policy": self.config.name,
            "parameters": self.config.parameters,
            "sequences": 1,
            "budget": self.budget,
        }

    def note(self, size: CacheSize) -> None:
        self.held, self.peak_blocks, self.noted_at = size, max(self.peak_blocks, size.blocks), size.tokens

    def count(self, counts: HeadCounts) -> None:
        self.compressions += 1
        self.merged += counts.merged
        self.evicted += counts.evicted
        self.kept, self.noted_at = counts, -1

    def proof(self, bytes_per_block: int) -> dict[str, Any]:
        """A ``CompressionProof`` as a JSON object, of the request as it was when ``held`` was noted."""
        return {
            **self.asked,
            "tokens": self._tokens(),
            "entries": self._entries(),
            "bytes": {"end": self.held.blocks * bytes_per_block, "peak": self.peak_blocks * bytes_per_block},
            "blocks_returned": self.blocks_returned,
            "compressions": self.compressions,
            "merged": self.merged,
            "evicted": self.evicted,
            "reused_tokens": self.reused_tokens,
            "notes": [note for note in (self._raised(), self._idle(), self._pressed(), self._bounded()) if note],
        }

    def _entries(self) -> dict[str, Any]:
        if self.kept is not None:
            mean = round(self.kept.kept / self.kept.heads, 2)
            return {"mean": mean, "least": self.kept.least, "most": self.kept.most}
        if self.reused_tokens:
            return {"mean": self.reused_entries, "least": None, "most": None}
        return dict.fromkeys(("mean", "least", "most"), self._tokens())

    def _tokens(self) -> int:
        """Of which entries are; the newest token of an answer is in no cache, but for steps that are under way."""
        return max(0, min(self.held.tokens, self.request.num_tokens - 1))

    def _raised(self) -> str | None:
        """That the policy needs more than the share that was asked for."""
        if self.config is None or isinstance(self.config.budget, int):
            return None
        context = self.config.resolve_context(self.request.num_prompt_tokens)
        share = self.config.budget * context
        if self.budget is None or self.budget < share + 1:
            return None
        return (
            f"the budget was raised from {share:g} entries, {self.config.budget:g} of {context} tokens, to "
            f"{self.budget}, the least that the policy keeps"
        )

    def _pressed(self) -> str | None:
        if self.config is None or not self.config.awaits_pressure or not self.compressions:
            return None
        return "the pool of blocks was short, for which the request was to be compressed"

    def _bounded(self) -> str | None:
        """That a context was marked, and more than it was compressed."""
        if self.config is None or self.config.context_tokens is None or self.config.decode != "bounded":
            return None
        if self.compressions <= (0 if self.reused_tokens else 1):
            return None
        return "what follows the context was compressed too, as decode 'bounded' asks for; 'grow' keeps it whole"

    def _idle(self) -> str | None:
        """Why nothing was compressed; None: something was."""
        if self.compressions or self.reused_tokens:
            return None
        if self.request.resumable:
            return "nothing was compressed: prompts that are streamed to the engine are not"
        if self.config is None:
            return f"nothing was compressed: the policy is {FULL!r}"
        if self.compression is None:
            most = self.request.num_prompt_tokens + self.request.max_tokens
            return (
                f"nothing was compressed: the budget is {self.budget} entries, and prompt and answer together "
                f"could come to {most} tokens at most"
            )
        if self.config.awaits_pressure:
            return "nothing was compressed: the pool of blocks was never short while the request could be compressed"
        due_at = self.compression.next_compression(UNCOMPRESSED)
        if due_at is None:
            return (
                f"nothing was compressed: the context's {self.compression.context} tokens are within the budget of "
                f"{self.budget} entries, and what follows them is kept whole"
            )
        return (
            f"nothing was compressed: the request ended at {self._tokens()} tokens, and its first compression was due "
            f"at {due_at}"
        )


class Proofs:
    """The ``RequestHistory`` of each request that is answered with a proof: those with the field, or a default.

    size_of: what a request's cache holds now.
    """

    def __init__(self, bytes_per_block: int, size_of: SizeOf) -> None:
        self._bytes_per_block, self._size_of = bytes_per_block, size_of
        self._histories: dict[str, RequestHistory] = {}

    def __len__(self) -> int:
        return len(self._histories)

    def begin(
        self, request: "Request", asked: Any, config: CompressionConfig | None, compression: RequestCompression | None
    ) -> None:
        """Starts a request's history. asked: its field; None: it has none. Raises what the policy's parts raise."""
        if asked is not None or config is not None:
            self._histories[request.request_id] = RequestHistory.of(request, config, compression)

    def note(self, request: "Request") -> None:
        """Notes what the request holds, before it gives some of it back."""
        if history := self._histories.get(request.request_id):
            history.note(self._size_of(request))

    def note_returned(self, request_id: str, num_blocks: int) -> None:
        if history := self._histories.get(request_id):
            history.blocks_returned += num_blocks

    def note_reused(self, request_id: str, front: SharedFront) -> None:
        """The request begins with a front that it has found."""
        if history := self._histories.get(request_id):
            history.reused_tokens, history.reused_entries = front.num_tokens, front.segments.front
            history.kept = front.kept

    def kept(self, request_id: str) -> HeadCounts | None:
        """What the request's newest compression came to."""
        history = self._histories.get(request_id)
        return None if history is None else history.kept

    def count(self, report: CompressionReport) -> None:
        """Counts compressions that workers have carried out."""
        for request_id, counts in report.counts.items():
            if history := self._histories.get(request_id):
                history.count(counts)

    def end(self, request: "Request", params: dict[str, Any] | None) -> dict[str, Any] | None:
        """The ``kv_transfer_params`` of a request that ends, with its proof."""
        history = self._histories.pop(request.request_id, None)
        return params if history is None else self._with_proof(params, history)

    def add_to(self, outputs_by_client: "dict[int, EngineCoreOutputs]") -> None:
        """Adds proofs to the outputs of running requests with stop strings, which the front end ends by itself."""
        for output, history in outputs_with(outputs_by_client, self._histories):
            if history.request.sampling_params.stop:
                tokens = history.request.num_computed_tokens
                if history.noted_at <= tokens < history.noted_at + NOTED_EVERY:
                    history.held = replace(history.held, tokens=tokens)
                else:
                    self.note(history.request)
                output.kv_transfer_params = self._with_proof(output.kv_transfer_params, history)

    def _with_proof(self, params: dict[str, Any] | None, history: RequestHistory) -> dict[str, Any]:
        return {**(params or {}), PROOFS_KEY: [history.proof(self._bytes_per_block)]}
