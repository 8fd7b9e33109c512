"""Limits of requests: what the server and the model allow, and memory outside the pool."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from vllm_kvmerge.ops.coded import Coding, slots_of
from vllm_kvmerge.ops.types import METADATA_BYTES
from vllm_kvmerge.policies import PARTS, PRESETS
from vllm_kvmerge.policies.allocators import Threshold
from vllm_kvmerge.policies.base import HeadShape
from vllm_kvmerge.policies.composition import held_by
from vllm_kvmerge.policies.errors import label
from vllm_kvmerge.request.spec import (
    EXTRA_ARGS_KEY,
    FULL,
    CompressionError,
    CompressionSpec,
    Obstacle,
    refusal,
    refuse_first,
)

KEPT_SHARE = 4
"""Bound on workers' memory outside the pool for all running requests, as a multiple of ``max_compaction_bytes``."""

POOL_SHARE = 4
"""A quarter of the pool bounds it too, as long as a single request fits."""

DEVICE_SHARE = 0.03
"""Of a GPU's memory: bounds both it and the default of ``max_compaction_bytes``."""


CALIBRATED = "calibrated"
"""The preset that needs the budgets of heads."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes and traits of one worker's part of the model.

    num_layers: that are compressed. item_size: bytes of a number of the model's; cache_item_size: of one in the cache;
    None: the same. caps_logits, has_sinks: what its attention does beyond a softmax (``Softmax``). has_latents: an
    entry is one vector, key and value at once (MLA), and ``head_size`` its length. has_windows, has_states: it has
    other layers, which are not compressed: they see the newest tokens alone, or have states (Mamba, linear attention).
    has_surrogate: a model predicts scores of hidden states. has_head_budgets: what its heads need is known.
    num_positions: that RoPE has a turn for; None: not known.
    front_obstacles: why fronts cannot be coded so, by the coding; None: all can.
    rotation_obstacle, window_rotation_obstacle: why keys, and those of layers with a window, cannot be turned back to
    what they were before RoPE; hidden_states_obstacle: what the server does so that hidden states cannot be seen;
    None: they can.
    """

    num_layers: int
    num_kv_heads: int
    group_size: int
    head_size: int
    hidden_size: int
    item_size: int
    cache_item_size: int | None = None
    caps_logits: bool = False
    has_sinks: bool = False
    rotation_obstacle: str | None = None
    hidden_states_obstacle: str | None = None
    has_surrogate: bool = False
    has_head_budgets: bool = False
    num_positions: int | None = None
    has_windows: bool = False
    has_latents: bool = False
    window_rotation_obstacle: str | None = None
    has_states: bool = False
    front_obstacles: Mapping[Coding, str] | None = None

    @property
    def row_bytes(self) -> int:
        """Of a key or a value in the cache."""
        return self.head_size * (self.cache_item_size or self.item_size)


def most_entries(spec: CompressionSpec, num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Entries per KV head that the largest of a request's compressions reads; 0: it is never compressed."""
    total, context = num_prompt_tokens + max_tokens, spec.resolve_context(num_prompt_tokens)
    budget = spec.resolve_budget(context)
    if total <= budget or spec.awaits_pressure:
        return 0 if total <= budget else total
    most, largest = spec.resolve_capacity(context) or total, 0
    if context > budget:
        largest = min(context, most + spec.prefill.chunk) if spec.prefill else context
    if spec.decode == "bounded":
        # A question is read as a whole before any of it is dropped.
        question = min(context, most) + num_prompt_tokens - context
        largest = max(largest, min(max(most + spec.resolve_interval(budget, block_size), question), total))
    if spec.is_refreshed(num_prompt_tokens):
        largest = max(largest, total if spec.decode == "bounded" else context)
    return largest if largest > budget else 0


def most_positions(spec: CompressionSpec, num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Positions that a request takes if RoPE counts the entries of its cache."""
    total, context = num_prompt_tokens + max_tokens, spec.resolve_context(num_prompt_tokens)
    if spec.never_compresses(num_prompt_tokens, max_tokens):
        return total
    places = spec.resolve_capacity(context) or total
    before = min(context, places + spec.prefill.chunk) if spec.prefill else context
    question = min(places, context) + num_prompt_tokens - context
    after = question + max_tokens
    if spec.decode == "bounded":
        after = min(after, places + spec.resolve_interval(spec.resolve_budget(context), block_size))
    return min(total, max(before, question, after))


@dataclass(frozen=True)
class Limits:
    """Limits that requests are held to.

    allowed_policies: names; None: all. max_bytes: of a request's memory outside the pool, its complete cache not
    counted, and of what a compression works with for one KV head. max_seconds: that another package's part may take for
    one compression. workspace_bytes: of working memory for the compressions of a step. block_size: in tokens.
    max_model_len: most tokens of a request. max_external_bytes: of all complete caches in a worker. head_pages: heads
    with different budgets hold their entries in pages of their own. num_token_ids: of the model. max_num_seqs: requests
    that run at once. has_prefix_cache: the server does. shares_contexts: what has been compressed stays in the prefix
    cache. device_room: ``DEVICE_SHARE`` of a worker's GPU, in bytes; None: there is none. pool_bytes: that a worker's
    pool was told to have; None: not told. pool_tokens: that the pool has slots for; None: not known yet. window_blocks:
    of each group of layers with a window or a state, the most blocks that it takes for one request, and the tokens of a
    block.
    """

    allowed_policies: frozenset[str] | None
    max_bytes: int
    max_seconds: float
    shape: ModelShape
    block_size: int
    max_model_len: int
    workspace_bytes: int = 64 << 20
    max_external_bytes: int = 0
    head_pages: bool = False
    num_token_ids: int = 1 << 31
    max_num_seqs: int = 2
    has_prefix_cache: bool = True
    shares_contexts: bool = True
    device_room: int | None = None
    pool_bytes: int | None = None
    pool_tokens: int | None = None
    window_blocks: tuple[tuple[int, int], ...] = ()

    def check(self, spec: CompressionSpec, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Refuses compression that the server or the model rules out, or that takes too much memory for a prompt of
        this length and at most ``max_tokens`` new tokens.

        Raises:
            CompressionError: says what would be allowed.
        """
        refuse_first(self._disallowed(spec))
        refuse_first(self._unsupported(spec))
        max_tokens = self.possible_tokens(num_prompt_tokens, max_tokens)
        self._check_positions(spec, num_prompt_tokens, max_tokens)
        if spec.never_compresses(num_prompt_tokens, max_tokens):
            return
        self._check_repetition(spec, spec.resolve_context(num_prompt_tokens))
        if spec.is_refreshed(num_prompt_tokens):
            self._check_external(num_prompt_tokens + max_tokens)
        self._check_memory(spec, num_prompt_tokens, max_tokens)

    def check_room(self, spec: CompressionSpec | None, num_prompt_tokens: int) -> None:
        """Refuses a request whose prompt, however little else runs, would never fit into the pool; None: a request
        that is not compressed.

        Raises:
            CompressionError: says what would fit.
        """

        def slots(length: int) -> int:
            return self.slots(spec, length) + self.window_slots(length)

        if self.pool_tokens is None or slots(num_prompt_tokens) < self.pool_tokens:
            return
        pool, needed = self.pool_tokens, slots(num_prompt_tokens)
        longest = _most(1, num_prompt_tokens, lambda length: slots(length) < pool)
        what = "without compression" if spec is None else f"with {spec.name!r}"
        message = f"{num_prompt_tokens} tokens take {needed} slots of the KV cache {what}, and it has {pool}; allowed: "
        message += f"up to {longest or 0} tokens, or {EXTRA_ARGS_KEY} with a budget and prefill.chunk that fit"
        field = "prompt" if spec is None else f"{EXTRA_ARGS_KEY}.prefill"
        raise CompressionError(field, message, "too_long_for_pool")

    def slots(self, spec: CompressionSpec | None, num_prompt_tokens: int) -> int:
        """Most slots that a request takes in layers that see all tokens, alone, until it generates."""
        if spec is None:
            return num_prompt_tokens
        context = spec.resolve_context(num_prompt_tokens)
        if context <= spec.resolve_budget(context) or spec.prefill is None:
            return num_prompt_tokens
        # A front may end within a block, and a tail may begin within one.
        front = min(context, self._kept(spec, context) or context)
        followed = max(min(context - front, spec.prefill.chunk), num_prompt_tokens - context)
        return min(front + followed + 2 * self.block_size, num_prompt_tokens)

    def window_slots(self, num_tokens: int) -> int:
        """Most slots that a request of ``num_tokens`` takes in layers with a window or a state."""
        return sum(min(-(-num_tokens // size), most) for most, size in self.window_blocks) * self.block_size

    def _kept(self, spec: CompressionSpec, context: int) -> int | None:
        """Most slots that any compression leaves; None: as many as there are tokens, as in layers that are skipped."""
        capacity = spec.resolve_capacity(context)
        if self.head_pages and capacity is not None:
            capacity = spec.resolve_budget(context)
        return None if capacity is None else -(-capacity // slots_of(spec.front))

    def most_generated(self, spec: CompressionSpec | None, num_prompt_tokens: int) -> int:
        """New tokens that the pool has room for if the request runs alone, up to those that the model can read."""
        most = self.possible_tokens(num_prompt_tokens, None)
        if self.pool_tokens is None:
            return most

        def fits(num_tokens: int) -> bool:
            pool = self.pool_tokens - self.window_slots(num_prompt_tokens + num_tokens)  # type: ignore[operator]
            return num_tokens <= self._generated_in(pool, spec, num_prompt_tokens)

        return most if fits(most) else _most(1, most, fits) or 1

    def _generated_in(self, pool: int, spec: CompressionSpec | None, num_prompt_tokens: int) -> int:
        """New tokens that ``pool`` slots have room for, up to those that the model can read."""
        most, held = self.possible_tokens(num_prompt_tokens, None), num_prompt_tokens
        if pool >= self.max_model_len:
            return most
        if spec is not None:
            context = spec.resolve_context(num_prompt_tokens)
            budget, kept = spec.resolve_budget(context), self._kept(spec, context)
            interval = spec.resolve_interval(budget, self.block_size)
            # A front may end within a block, a tail begin within one; under pressure the pool must not be full before.
            slack = (3 if spec.awaits_pressure else 2) * self.block_size
            if spec.decode == "bounded" and kept is not None and kept + interval + slack <= pool:
                return most
            if spec.awaits_pressure:
                # The pool is filled twice, the second time beside the front.
                held += min(0, (pool if kept is None else kept) + slack - pool)
            elif context > budget:
                held += min(context, kept or context) - context + slack
        return min(most, max(1, pool - held))

    def possible_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """New tokens that a request can come to. max_tokens: that it asks for; None: as many as the model can."""
        most = max(0, self.max_model_len - num_prompt_tokens)
        return most if max_tokens is None else min(max_tokens, most)

    @property
    def is_calibrated(self) -> bool:
        """True if requests that name no policy may get one that needs the budgets of the model's heads."""
        is_allowed = self.allowed_policies is None or CALIBRATED in self.allowed_policies
        return (
            self.shape.has_head_budgets and is_allowed and not (self.shape.rotation_obstacle or self.shape.has_latents)
        )

    def _disallowed(self, spec: CompressionSpec) -> Iterator[Obstacle]:
        """Policies that the server's operator has not allowed, and parts that no allowed policy uses."""
        if self.allowed_policies is None:
            return
        policies, what = self.allowed_policies | {FULL}, "is not allowed on this server"
        yield spec.name not in policies, "policy", "not_allowed", f"{spec.name!r} {what}", ", ".join(sorted(policies))
        # Trackers follow from the other parts, unless they cost the model's time: contexts that are repeated, or
        # hidden states that models of each layer read, so that no part of a prompt may come from the prefix cache.
        is_costly = spec.policy.tracker.repeats_context or spec.policy.tracker.predicts_scores
        for kind in ("selector", "merger", "allocator", *(["tracker"] if is_costly else [])):
            name = getattr(spec.policy, kind).name
            parts = {getattr(PRESETS[policy], kind) for policy in self.allowed_policies - {FULL}}
            # A budget of a threshold is not a policy.
            is_other = name not in parts and name != Threshold.name
            yield is_other, kind, "not_allowed", f"{name!r} {what}", ", ".join(sorted(parts))

    def _unsupported(self, spec: CompressionSpec) -> Iterator[Obstacle]:
        """What the model, or the way in which the server runs it, rules out."""
        shape, tracker, name = self.shape, spec.policy.tracker, spec.policy.tracker.name
        parts = [(kind, getattr(spec.policy, kind)) for kind in PARTS]
        allocator = spec.policy.allocator
        in_cache, turned = spec.positions == "cache", "'cache' rotates keys, but the model"
        layers, latent = "does not support models with", "but the model keeps one latent for both (MLA)"
        windows = f"{layers} sliding-window or chunked-local layers where there is no prefix cache"
        states = f"{layers} Mamba or linear-attention layers"
        softmax = "computes attention differently from the model, which"
        in_front = spec.front and self.front_obstacle(spec.front)
        unseen = f"hidden states cannot be seen, because the server {shape.hidden_states_obstacle}"
        # fmt: off
        for is_there, field, what, allowed in (
            (shape.has_windows and shape.window_rotation_obstacle and in_cache,
             "positions", f"{turned} {shape.window_rotation_obstacle}", "'text'"),
            (shape.has_windows and tracker.repeats_context and not self.has_prefix_cache,
             "tracker", f"{name!r} {windows}", "another tracker"),
            *((shape.has_latents and not part.takes_latents,
               kind, f"{part.name!r} of the policy {spec.name!r} {'merges' if kind == 'merger' else 'reads'} "
               f"keys and values, {latent}",
               "'drop', which evicts" if kind == "merger" else f"another {kind}") for kind, part in parts),
            (shape.has_latents and tracker.normalizes,
             "normalized", f"{name!r} then weighs values, {latent}", "false"),
            (shape.has_latents and spec.refresh is not None,
             "refresh", f"a refresh copies keys and values, {latent}", "null"),
            (in_front, "front", f"{spec.front!r} is not for {in_front}", "null"),
            (shape.has_states and in_cache, "positions", f"'cache' {states}", "'text'"),
            (shape.has_states and spec.awaits_pressure, "trigger", f"'pressure' {states}", "'budget'"),
            (shape.has_states and tracker.repeats_context, "tracker", f"{name!r} {states}", "another tracker"),
            (shape.has_states and spec.reuse is not None, "reuse", f"{spec.reuse!r} {states}", "null"),
            *((is_there, kind, f"{part.name!r} {softmax} {trait}", f"another {kind}") for kind, part in parts
              for is_there, trait in ((shape.caps_logits and not part.takes_cap, "soft-caps its attention logits"),
                                      (shape.has_sinks and not part.takes_sinks, "has attention sinks"))),
            (shape.rotation_obstacle and in_cache, "positions", f"{turned} {shape.rotation_obstacle}", "'text'"),
            *((shape.rotation_obstacle and part.needs_rotation,
               kind, f"{part.name!r} needs keys before RoPE, but the model {shape.rotation_obstacle}",
               f"another {kind}") for kind, part in parts),
            (tracker.predicts_scores and not shape.has_surrogate,
             "tracker", f"{name!r} needs a KVzap model, and the server has none",
             "another tracker, or on servers started with --kvzap and a model that is published for the served one, or "
             "trained by vllm-kvmerge train-kvzap"),
            (allocator.needs_head_budgets and not shape.has_head_budgets,
             "allocator", f"{allocator.name!r} needs the budgets of the model's heads, and the server has none",
             "another allocator, or on servers started with --head-budgets and a file of vllm-kvmerge calibrate"),
            (shape.hidden_states_obstacle and tracker.predicts_scores, "tracker", unseen, "with --enforce-eager"),
            (shape.hidden_states_obstacle and tracker.normalizes, "normalized", unseen, "with --enforce-eager"),
        ):  # fmt: on
            yield is_there, field, "unsupported_model", what, allowed
        what = f"{spec.reuse!r} needs a server that keeps compressed caches"
        yield spec.reuse is not None and not self.shares_contexts, "reuse", "not_kept", what, "null"

    def _check_positions(self, spec: CompressionSpec, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuses requests that would outlast the model's positions although they count entries."""
        most = self.shape.num_positions
        if spec.positions == "text" or most is None:
            return
        if (count := most_positions(spec, num_prompt_tokens, max_tokens, self.block_size)) > most:
            what = f"'cache' comes to {count} positions at once, and the model has {most}"
            allowed = "prefill in chunks, decode 'bounded', or a smaller budget, chunk, interval or number of tokens"
            raise refusal("positions", "too_many_positions", what, allowed)

    def _check_repetition(self, spec: CompressionSpec, context: int) -> None:
        """Refuses contexts that cannot be repeated, a chunk at a time, after themselves."""
        tracker = spec.policy.tracker
        if not tracker.repeats_context or context <= spec.resolve_budget(context):
            return
        for name, value in tracker:
            if isinstance(value, list) and value and max(value) >= self.num_token_ids:
                what = f"the model has no token {max(value)}"
                raise refusal(name, "invalid_value", what, f"0 to {self.num_token_ids - 1}")
        if self.max_num_seqs < 2:
            what = "the context is repeated beside the request"
            raise refusal("tracker", "not_allowed", what, "on servers with --max-num-seqs of 2 or more")
        most = self.max_model_len - 1  # one token more, which vLLM samples
        if context + (num_repeated := tracker.num_repeated(context)) > most:
            longest = _most(0, context, lambda length: length + tracker.num_repeated(length) <= most)
            what = f"repeating a context of {context} tokens takes {num_repeated} more, and the model reads {most}"
            allowed = f"smaller chunks, or contexts of up to {longest or 0} tokens"
            raise refusal("chunk_size", "too_long_to_repeat", what, allowed)

    def _check_external(self, total: int) -> None:
        """Refuses requests whose complete cache has no room outside the pool."""
        if (needed := self.external_bytes(total)) > self.max_external_bytes:
            most = self.max_external_bytes // self.external_bytes(self.block_size) * self.block_size
            takes, room = _mebibytes(needed), f"--external-cache-bytes of {_mebibytes(self.max_external_bytes)}"
            what = f"the complete cache of {total} tokens, prompt and max_tokens, takes {takes} outside the pool, more "
            what += f"than the server's {room}"
            raise refusal("refresh", "no_external_room", what, f"up to {most} tokens")

    def _check_memory(self, spec: CompressionSpec, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuses queries that are kept, and work on a single KV head, which cannot be divided, beyond the limit."""
        num_bytes = self.ring_bytes(spec.query_window, num_prompt_tokens + max_tokens)
        what, smaller = "its newest queries", "smaller windows of queries"
        if num_bytes <= self.max_bytes:
            num_entries = most_entries(spec, num_prompt_tokens, max_tokens, self.block_size)
            budget = spec.resolve_budget(spec.resolve_context(num_prompt_tokens))
            sizes = self.shape.head_size, self.shape.group_size, self.shape.hidden_size
            shape = HeadShape(num_entries, min(budget, num_entries), *sizes)
            num_bytes = 4 * spec.policy.held(shape)
            largest = max(spec.policy.parts, key=lambda part: held_by(part, shape))
            what = f"compressing {num_entries} entries of one KV head, most of it {label(largest)},"
            smaller += ", shorter prompts, another budget or policy"
        if num_bytes > self.max_bytes:
            what += f" would take {_mebibytes(num_bytes)}, more than {_mebibytes(self.max_bytes)}"
            allowed = f"{smaller}, or more by the server's option --max-compaction-bytes"
            raise refusal("", "too_expensive", what, allowed)

    def front_obstacle(self, coding: Coding) -> str | None:
        """Why fronts cannot be coded so; None: they can."""
        found = (self.shape.front_obstacles or {}).get(coding)
        return found or (None if self.head_pages else "servers without head_pages")

    @property
    def num_heads(self) -> int:
        """KV heads of all layers of a worker."""
        return self.shape.num_layers * self.shape.num_kv_heads

    def ring_bytes(self, query_window: int, num_tokens: int) -> int:
        """Bytes of the newest queries, kept from step to step, of a request of ``num_tokens`` tokens."""
        window = min(query_window, num_tokens)
        return window * self.num_heads * self.shape.group_size * self.shape.head_size * self.shape.item_size

    @property
    def kept_bytes(self) -> int:
        """Most bytes of the newest queries and prompt scores of all running requests, in one worker."""
        length = self.max_model_len
        one = min(self.max_bytes, self.ring_bytes(length, length)) + self.prompt_score_bytes(length)
        most = KEPT_SHARE * self.max_bytes
        if self.device_room is not None:
            most = min(most, max(self.max_bytes, self.device_room))
        if self.pool_bytes is not None:
            most = min(most, max(one, self.pool_bytes // POOL_SHARE))
        return min(most, self.max_num_seqs * one)

    def external_bytes(self, num_tokens: int) -> int:
        """Bytes of the complete cache of ``num_tokens`` tokens: whole blocks."""
        cell = 2 * self.shape.row_bytes + METADATA_BYTES
        return self.num_heads * cell * -(-num_tokens // self.block_size) * self.block_size

    def prompt_score_bytes(self, num_tokens: int) -> int:
        """Bytes of the two statistics per token of a prompt that is scored while it is computed."""
        return 2 * 4 * self.num_heads * num_tokens


def _most(least: int, value: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number below ``value``, and at least ``least``, that fits; None: none does."""
    if least >= value or not fits(least):
        return None
    low, high = least, value
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.4g} MiB"
