"""Accounts of requests: what a request's cache has held and what compression did to it, for its response."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm_kvmerge.engine.fronts import SharedFront
from vllm_kvmerge.engine.messages import CompressionReport, HeadCounts
from vllm_kvmerge.engine.schedule import UNCOMPRESSED, RequestCompression
from vllm_kvmerge.engine.usage import REPORT_KEY, STEPS_KEY, STREAM, USAGE_KEY, CacheSize
from vllm_kvmerge.request.proof import PROOFS_KEY
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY, FULL, CompressionSpec

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request

NUM_RECENT_STEPS, NUM_RECENT_CHANGES = 16, 32
"""Numbers of steps in a report, of the newest ones and of the newest that changed the number of blocks or compressed
the cache: vLLM merges outputs that the front end has not taken yet, and keeps the newest report."""

NOTED_EVERY = 16
"""Tokens after which a running request's blocks are counted again, for an output that may be its last."""


@dataclass
class Steps:
    """A request's cache sizes after each scheduled step, for whoever asks for a report.

    Sums are over the steps from the end of the prompt on, after their compression. streams: whether steps are reported
    one by one, with times since ``start`` (``time.monotonic()``).
    """

    bytes_per_block: int
    streams: bool = False
    start: float = field(default_factory=time.monotonic)
    count: int = 0
    total_entries: int = 0
    total_blocks: int = 0
    peak_entries: int = 0
    peak_external_bytes: int = 0
    num_compressions: int = 0
    num_refreshes: int = 0
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_STEPS))
    changes: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_CHANGES))
    _before: CacheSize = CacheSize(0, 0, 0)
    _after: CacheSize = CacheSize(0, 0, 0)

    def begin(self, size: CacheSize) -> None:
        """Takes the ``size`` before a step's compression."""
        self._before, self.peak_entries = size, max(self.peak_entries, size.entries)

    def add(self, size: CacheSize, is_in_prompt: bool, refresh: bool | None) -> dict[str, Any] | None:
        """Takes the ``size`` after a step's compression. refresh: whether it is one; None: there was none. Returns the
        step, to be reported when it has been computed; None if nobody asks for it, or it changes nothing."""
        if not is_in_prompt:
            self.count += 1
            self.total_entries += size.entries
            self.total_blocks += size.blocks
        if refresh is not None:
            self.peak_external_bytes = max(self.peak_external_bytes, size.external_bytes)
            self.num_compressions += 1
            self.num_refreshes += refresh
        if not self.streams or (refresh is None and self._after == size):
            return None
        self._after = size
        step = {"start": self._now(), "tokens": size.tokens, **self._as_json(size)}
        if refresh:
            step["refresh"] = True
        return step if refresh is None else step | {"before": self._as_json(self._before)}

    def end(self, step: dict[str, Any]) -> None:
        last = self.recent[-1] if self.recent else {"step": 0, "bytes": 0}
        step = {"step": last["step"] + 1, "end": self._now(), **step}
        self.recent.append(step)
        if "before" in step or step["bytes"] != last["bytes"]:
            self.changes.append(step)

    def _as_json(self, size: CacheSize) -> dict[str, int]:
        return {"entries": size.entries, "bytes": size.blocks * self.bytes_per_block}

    def _now(self) -> float:
        return round(time.monotonic() - self.start, 4)

    def newest(self) -> dict[str, Any]:
        """The newest steps, for a request that is still running."""
        first = self.recent[0]["step"] if self.recent else 0
        return {STEPS_KEY: [*(step for step in self.changes if step["step"] < first), *self.recent]}


@dataclass
class Account:
    """What has happened to a request so far. config: what it asks for; None: no compression. compression: that in
    numbers of tokens; None: nothing is ever compressed. is_proven: its answer says what compression did. steps: for its
    report; None: it asks for none. budget: in entries; None: no limit. kept: what the newest compression came to. held:
    the last size that was noted, at ``noted_at`` tokens."""

    request: "Request"
    config: CompressionSpec | None
    compression: RequestCompression | None
    is_proven: bool = True
    steps: Steps | None = None
    budget: int | None = None
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

    @property
    def may_stop(self) -> bool:
        """True if the front end may end the request, by a stop string: every output has all that the last one has."""
        params = self.request.sampling_params
        return params is not None and bool(params.stop)

    @cached_property
    def asked(self) -> dict[str, Any]:
        """Of its proof, what does not change."""
        parameters = {"policy": FULL} if self.config is None else self.config.parameters
        name = FULL if self.config is None else self.config.name
        return {"policy": name, "parameters": parameters, "sequences": 1, "budget": self.budget}

    def note(self, size: CacheSize) -> None:
        self.held, self.peak_blocks, self.noted_at = size, max(self.peak_blocks, size.blocks), size.tokens

    def count(self, counts: HeadCounts) -> None:
        self.compressions += 1
        self.merged += counts.merged
        self.evicted += counts.evicted
        self.kept, self.noted_at = counts, -1

    def answer(self, params: dict[str, Any] | None, bytes_per_block: int, is_last: bool) -> dict[str, Any] | None:
        """The request's ``kv_transfer_params`` with what it is to be told, in its last output or one before."""
        said = dict[str, Any]()
        if self.steps is not None:
            if is_last:
                said[REPORT_KEY] = self.report(self.steps, bytes_per_block)
            elif self.steps.streams:
                said[REPORT_KEY] = self.steps.newest()
        if self.is_proven and is_last:
            said[PROOFS_KEY] = [self.proof(bytes_per_block)]
        return {**(params or {}), **said} if said else params

    def report(self, steps: Steps, bytes_per_block: int) -> dict[str, Any]:
        """What the cache has held, as a JSON object; bytes over all layers and ranks. Means are None before the end of
        the prompt."""
        count = steps.count
        report = {
            "mean_entries": steps.total_entries / count if count else None,
            "mean_bytes": steps.total_blocks * bytes_per_block / count if count else None,
            "peak_entries": steps.peak_entries,
            "peak_bytes": self.peak_blocks * bytes_per_block,
            "compressions": steps.num_compressions,
            EXTRA_ARGS_KEY: self.asked["parameters"],
        }
        if steps.peak_external_bytes:
            report |= {"refreshes": steps.num_refreshes, "external_bytes": steps.peak_external_bytes}
        return report | steps.newest() if steps.streams else report

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


class Accounts:
    """The ``Account`` of each request with the field or a default, which is answered with a proof, or with
    ``USAGE_KEY``, which asks for a report.

    size_of: what a request's cache holds now.
    """

    def __init__(self, bytes_per_block: int, size_of: "Callable[[Request], CacheSize]") -> None:
        self._bytes_per_block, self._size_of = bytes_per_block, size_of
        self._accounts: dict[str, Account] = {}
        self._watched: dict[str, Account] = {}
        """Those with steps."""

    def __len__(self) -> int:
        return len(self._accounts)

    @property
    def has_steps(self) -> bool:
        return bool(self._watched)

    def begin(
        self,
        request: "Request",
        extra: dict[str, Any],
        config: CompressionSpec | None,
        compression: RequestCompression | None,
    ) -> None:
        """Opens a request's account. extra: its ``extra_args``. Raises what the policy's parts raise."""
        asks, is_proven = extra.get(USAGE_KEY), extra.get(EXTRA_ARGS_KEY) is not None or config is not None
        if not (asks or is_proven):
            return
        steps = Steps(self._bytes_per_block, streams=asks == STREAM) if asks else None
        account = Account(request, config, compression, is_proven, steps)
        if config is not None:
            account.budget = config.resolve_budget(config.resolve_context(request.num_prompt_tokens))
        self._accounts[request.request_id] = account
        if asks:
            self._watched[request.request_id] = account

    def note(self, request: "Request") -> None:
        """Notes what the request holds, before it gives some of it back."""
        if account := self._accounts.get(request.request_id):
            account.note(self._size_of(request))

    def begin_step(self, running: "list[Request]") -> None:
        """Notes the sizes of a scheduled step, before its compressions."""
        for request, account, steps in self._reporting(running):
            size = self._size_of(request)
            account.note(size)
            steps.begin(size)

    def end_step(self, running: "list[Request]", compressed: dict[str, bool]) -> dict[str, dict[str, Any]]:
        """The step of each request with a stream, for ``computed``: under asynchronous scheduling, other steps are
        scheduled before this one has been computed. compressed: requests, and whether theirs is a refresh."""
        found = {}
        for request, _, steps in self._reporting(running):
            size = self._size_of(request)
            is_in_prompt = size.tokens < request.num_prompt_tokens
            if step := steps.add(size, is_in_prompt, compressed.get(request.request_id)):
                found[request.request_id] = step
        return found

    def computed(self, steps: dict[str, dict[str, Any]]) -> None:
        for request_id, step in steps.items():
            if (account := self._watched.get(request_id)) and account.steps is not None:
                account.steps.end(step)

    def note_returned(self, request_id: str, num_blocks: int) -> None:
        if account := self._accounts.get(request_id):
            account.blocks_returned += num_blocks

    def note_reused(self, request_id: str, front: SharedFront) -> None:
        """The request begins with a front that it has found."""
        if account := self._accounts.get(request_id):
            account.reused_tokens, account.reused_entries = front.num_tokens, front.segments.front
            account.kept = front.kept

    def kept(self, request_id: str) -> HeadCounts | None:
        """What the request's newest compression came to."""
        account = self._accounts.get(request_id)
        return None if account is None else account.kept

    def count(self, report: CompressionReport) -> None:
        """Counts compressions that workers have carried out."""
        for request_id, counts in report.counts.items():
            if account := self._accounts.get(request_id):
                account.count(counts)

    def end(self, request: "Request", params: dict[str, Any] | None) -> dict[str, Any] | None:
        """The ``kv_transfer_params`` of a request that ends, with its report and proof."""
        self._watched.pop(request.request_id, None)
        account = self._accounts.pop(request.request_id, None)
        return params if account is None else account.answer(params, self._bytes_per_block, is_last=True)

    def add_to(self, outputs_by_client: "dict[int, EngineCoreOutputs]") -> None:
        """Adds the newest steps to the outputs of running requests with a stream, and all to those that may stop."""
        if not self._accounts:
            return
        for outputs in outputs_by_client.values():
            for output in outputs.outputs:
                account = self._accounts.get(output.request_id)
                if account is None or not (account.may_stop or output.request_id in self._watched):
                    continue
                if account.may_stop:
                    tokens = account.request.num_computed_tokens
                    if account.noted_at <= tokens < account.noted_at + NOTED_EVERY:
                        account.held = replace(account.held, tokens=tokens)
                    else:
                        self.note(account.request)
                params = output.kv_transfer_params
                output.kv_transfer_params = account.answer(params, self._bytes_per_block, is_last=account.may_stop)

    def _reporting(self, running: "list[Request]") -> "Iterator[tuple[Request, Account, Steps]]":
        if self._watched:
            for request in running:
                if (account := self._watched.get(request.request_id)) and account.steps is not None:
                    yield request, account, account.steps
