"""Limits that requests are held to: what the server and the model allow, and memory outside the pool."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_kvmerge.ops.types import METADATA_BYTES
from vllm_kvmerge.policies import PARTS, PRESETS
from vllm_kvmerge.policies.allocators import Threshold
from vllm_kvmerge.policies.base import HeadShape, Tracker
from vllm_kvmerge.policies.composition import held_by
from vllm_kvmerge.policies.errors import label
from vllm_kvmerge.request.parameters import EXTRA_ARGS_KEY, FULL, CompressionConfig, CompressionError

KEPT_SHARE = 4
"""Bound on workers' memory outside the pool for all running requests, as a multiple of ``max_compaction_bytes``."""

POOL_SHARE = 4
"""A quarter of the pool bounds it too, as long as a single request fits."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one worker's part of the model. num_layers: that are compressed. item_size: bytes of a number of the
    model's. cache_item_size: of one in the cache; None: the same. caps_logits, has_sinks: what its attention does
    beyond a softmax (``Softmax``). rotation_obstacle: why keys
    cannot be turned back to what they were before RoPE; None: they can. hidden_states_obstacle: what the server does so
    that hidden states cannot be seen; None: they can. has_surrogate: a model predicts scores of hidden states.
    num_positions: that RoPE has a turn for; None: not known. has_windows: other layers see the newest tokens alone, and
    are not compressed. window_rotation_obstacle: why their keys cannot be turned; None: they can. has_latents: an entry
    is one vector, key and value at once (MLA), and ``head_size`` its length. has_states: other layers, of Mamba or
    linear attention, have states, which are not compressed."""

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
    num_positions: int | None = None
    has_windows: bool = False
    has_latents: bool = False
    window_rotation_obstacle: str | None = None
    has_states: bool = False

    @property
    def row_bytes(self) -> int:
        """Of a key or a value in the cache."""
        return self.head_size * (self.cache_item_size or self.item_size)


def most_entries(config: CompressionConfig, num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Entries per KV head that the largest of a request's compressions reads; 0: it is never compressed."""
    total, context = num_prompt_tokens + max_tokens, config.resolve_context(num_prompt_tokens)
    budget = config.resolve_budget(context)
    interval = config.resolve_interval(budget, block_size)
    if total <= budget or config.awaits_pressure:
        return 0 if total <= budget else total
    capacity = config.resolve_capacity(context)
    most, largest = total if capacity is None else capacity, 0
    if context > budget:
        largest = context if config.prefill is None else min(context, most + config.prefill.chunk)
    if config.decode == "bounded":
        # A question is read as a whole before any of it is dropped.
        question = min(context, most) + num_prompt_tokens - context
        largest = max(largest, min(max(most + interval, question), total))
    if config.refresh is not None and config.is_refreshed(num_prompt_tokens):
        largest = max(largest, total if config.decode == "bounded" else context)
    return largest if largest > budget else 0


def most_positions(config: CompressionConfig, num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Positions that a request takes if RoPE counts the entries of its cache."""
    total, context = num_prompt_tokens + max_tokens, config.resolve_context(num_prompt_tokens)
    if config.never_compresses(num_prompt_tokens, max_tokens):
        return total
    places = config.resolve_capacity(context) or total
    before = places + config.prefill.chunk if config.prefill else context
    question = min(places, context) + num_prompt_tokens - context
    after = question + max_tokens
    if config.decode == "bounded":
        after = min(after, places + config.resolve_interval(config.resolve_budget(context), block_size))
    return min(total, max(min(before, context), question, after))


@dataclass(frozen=True)
class Limits:
    """Limits that requests are held to.

    allowed_policies: names; None: all. max_bytes: of a request's memory outside the pool, its complete cache not
    counted, and of what a compression works with for one KV head. max_seconds: that another package's part may take for
    one compression. workspace_bytes: of working memory for the compressions of a step. block_size: in tokens.
    max_model_len: most tokens of a request. max_external_bytes: of all complete caches in a worker. head_pages: heads
    with different budgets hold their entries in pages of their own. num_token_ids: of the model. max_num_seqs: requests
    that run at once. has_prefix_cache: the server does. shares_contexts: what has been compressed stays in the prefix
    cache. pool_bytes: that a worker's pool was told to have; None: not told. pool_tokens: that the pool has slots for;
    None: not known yet. window_blocks: of each group of layers with a window or a state, the most blocks that it takes
    for one request, and the tokens of a block.
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
    pool_bytes: int | None = None
    pool_tokens: int | None = None
    window_blocks: tuple[tuple[int, int], ...] = ()

    def check(self, config: CompressionConfig, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Refuses compression that the server or the model rules out, or that takes too much memory for a prompt of
        this length and at most ``max_tokens`` new tokens.

        Raises:
            CompressionError: says what would be allowed.
        """
        self._check_allowed(config)
        self._check_windows(config)
        self._check_latents(config)
        self._check_states(config)
        self._check_softmax(config)
        self._check_rotation(config)
        self._check_hidden_states(config.policy.tracker)
        if config.reuse is not None and not self.shares_contexts:
            message = f"{config.reuse!r} on a server that keeps no compressed cache; allowed: null"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.reuse", message, "not_kept")
        max_tokens = self.possible_tokens(num_prompt_tokens, max_tokens)
        self._check_positions(config, num_prompt_tokens, max_tokens)
        if config.never_compresses(num_prompt_tokens, max_tokens):
            return
        if config.policy.tracker.repeats_context:
            self._check_repetition(config, config.resolve_context(num_prompt_tokens))
        if config.is_refreshed(num_prompt_tokens):
            self._check_external(num_prompt_tokens + max_tokens)
        self._check_memory(config, num_prompt_tokens, max_tokens)

    def check_room(self, config: CompressionConfig | None, num_prompt_tokens: int) -> None:
        """Refuses a request whose prompt, however little else runs, would never fit into the pool; None: a request
        that is not compressed.

        Raises:
            CompressionError: says what would fit.
        """

        def slots(length: int) -> int:
            return self.slots(config, length) + self.window_slots(length)

        if self.pool_tokens is None or slots(num_prompt_tokens) < self.pool_tokens:
            return
        pool, needed = self.pool_tokens, slots(num_prompt_tokens)
        longest = _most(1, num_prompt_tokens, lambda length: slots(length) < pool)
        field = "prompt" if config is None else f"{EXTRA_ARGS_KEY}.prefill"
        what = "without compression" if config is None else f"with {config.name!r}"
        raise CompressionError(
            field,
            f"{num_prompt_tokens} tokens take {needed} slots of the KV cache {what}, and it has {pool}; allowed: up to "
            f"{longest or 0} tokens, or {EXTRA_ARGS_KEY} with a budget and prefill.chunk that fit",
            "too_long_for_pool",
        )

    def slots(self, config: CompressionConfig | None, num_prompt_tokens: int) -> int:
        """Most slots that a request takes in layers that see all tokens, alone, until it generates."""
        if config is None:
            return num_prompt_tokens
        context = config.resolve_context(num_prompt_tokens)
        front = self._front(config, context)
        if context <= config.resolve_budget(context) or config.prefill is None:
            return max(num_prompt_tokens, front)
        # A front may end within a block, and a tail may begin within one.
        followed = max(min(context - front, config.prefill.chunk), num_prompt_tokens - context)
        return min(front + followed + 2 * self.block_size, num_prompt_tokens)

    def window_slots(self, num_tokens: int) -> int:
        """Most slots that a request of ``num_tokens`` takes in layers with a window or a state."""
        return sum(min(-(-num_tokens // size), most) for most, size in self.window_blocks) * self.block_size

    def _front(self, config: CompressionConfig, context: int) -> int:
        """Most slots of a compressed context."""
        kept = self._kept(config, context)
        return context if kept is None else min(context, kept)

    def _kept(self, config: CompressionConfig, context: int) -> int | None:
        """Most slots that any compression leaves; None: as many as there are tokens, as in layers that are skipped."""
        capacity = config.resolve_capacity(context)
        return config.resolve_budget(context) if self.head_pages and capacity is not None else capacity

    def most_generated(self, config: CompressionConfig | None, num_prompt_tokens: int) -> int:
        """New tokens that the pool has room for if the request runs alone, up to those that the model can read."""
        most = max(0, self.max_model_len - num_prompt_tokens)
        if self.pool_tokens is None:
            return most

        def fits(num_tokens: int) -> bool:
            pool = self.pool_tokens - self.window_slots(num_prompt_tokens + num_tokens)  # type: ignore[operator]
            return num_tokens <= self._generated_in(pool, config, num_prompt_tokens)

        return most if fits(most) else _most(1, most, fits) or 1

    def _generated_in(self, pool: int, config: CompressionConfig | None, num_prompt_tokens: int) -> int:
        """New tokens that ``pool`` slots have room for, up to those that the model can read."""
        most = max(0, self.max_model_len - num_prompt_tokens)
        if pool >= self.max_model_len:
            return most
        held = num_prompt_tokens
        if config is not None and config.awaits_pressure:
            kept = self._kept(config, num_prompt_tokens)
            front = pool if kept is None else kept
            slack = 3 * self.block_size  # to compress before the pool is full, and where front and tail meet
            interval = config.resolve_interval(config.resolve_budget(num_prompt_tokens), self.block_size)
            if config.decode == "bounded" and front + interval + slack <= pool:
                return most
            # The pool is filled twice, the second time beside the front.
            held += min(0, front + slack - pool)
        elif config is not None:
            context = config.resolve_context(num_prompt_tokens)
            budget = config.resolve_budget(context)
            interval = config.resolve_interval(budget, self.block_size)
            kept = self._kept(config, context)
            if config.decode == "bounded" and kept is not None and kept + interval + 2 * self.block_size <= pool:
                return most
            if context > budget:
                held = self._front(config, context) + num_prompt_tokens - context + 2 * self.block_size
        return min(most, max(1, pool - held))

    def possible_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """New tokens that a request can come to. max_tokens: that it asks for; None: as many as the model can."""
        most = max(0, self.max_model_len - num_prompt_tokens)
        return most if max_tokens is None else min(max_tokens, most)

    def _check_allowed(self, config: CompressionConfig) -> None:
        """Refuses policies that the server's operator has not allowed, and parts that no allowed policy uses."""
        if self.allowed_policies is None:
            return
        if config.name not in self.allowed_policies:
            allowed = ", ".join(sorted(self.allowed_policies | {FULL}))
            message = f"{config.name!r} is not allowed on this server; allowed: {allowed}"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.policy", message, "not_allowed")
        # Trackers follow from the other parts, unless they cost the model's time: contexts that are repeated, or
        # hidden states that models of each layer read, so that no part of a prompt may come from the prefix cache.
        tracker = config.policy.tracker
        is_costly = tracker.repeats_context or tracker.predicts_scores
        kinds = ("selector", "merger", "allocator", *(["tracker"] if is_costly else []))
        for kind in kinds:
            name = getattr(config.policy, kind).name
            parts = {getattr(PRESETS[policy], kind) for policy in self.allowed_policies - {FULL}}
            # A budget of a threshold is not a policy.
            if name not in parts and name != Threshold.name:
                message = f"{name!r} is not allowed on this server; allowed: {', '.join(sorted(parts))}"
                raise CompressionError(f"{EXTRA_ARGS_KEY}.{kind}", message, "not_allowed")

    def _check_windows(self, config: CompressionConfig) -> None:
        """Refuses what cannot be done in some layers alone."""
        if not self.shape.has_windows:
            return
        reason = "does not work with a model that has sliding-window or chunked-local layers"
        if config.positions == "cache" and self.shape.window_rotation_obstacle is not None:
            message = f"{config.positions!r} needs keys turned, but the model {self.shape.window_rotation_obstacle}"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.positions", f"{message}; allowed: 'text'", "unsupported_model")
        if (tracker := config.policy.tracker).repeats_context and not self.has_prefix_cache:
            message = f"{tracker.name!r} {reason} where there is no prefix cache; allowed: another tracker"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.tracker", message, "unsupported_model")

    def _check_latents(self, config: CompressionConfig) -> None:
        """Refuses what needs keys and values of their own, for a model that keeps one latent for both."""
        if not self.shape.has_latents:
            return
        reason = "and the model keeps one latent for both (MLA)"
        for kind in PARTS:
            part = getattr(config.policy, kind)
            if not part.takes_latents:
                what = "merges" if kind == "merger" else "reads"
                message = f"{part.name!r} of the policy {config.name!r} {what} keys and values, {reason}"
                allowed = "'drop', which evicts" if kind == "merger" else f"another {kind}"
                raise CompressionError(
                    f"{EXTRA_ARGS_KEY}.{kind}", f"{message}; allowed: {allowed}", "unsupported_model"
                )
        if config.policy.tracker.normalizes:
            message = f"{config.policy.tracker.name!r} then weighs values, {reason}; allowed: false"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.normalized", message, "unsupported_model")
        if config.refresh is not None:
            message = f"a refresh copies keys and values, {reason}; allowed: null"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.refresh", message, "unsupported_model")

    def _check_states(self, config: CompressionConfig) -> None:
        """Refuses what would need the states of other layers at an earlier token, or for other positions."""
        if not self.shape.has_states:
            return
        tracker = config.policy.tracker
        for name, value, is_wanted, allowed in (
            ("positions", config.positions, config.positions == "cache", "'text'"),
            ("trigger", config.trigger, config.awaits_pressure, "'budget'"),
            ("tracker", tracker.name, tracker.repeats_context, "another tracker"),
            ("reuse", config.reuse, config.reuse is not None, "null"),
        ):
            if is_wanted:
                message = f"{value!r} does not work with a model that has Mamba or linear-attention layers"
                raise CompressionError(
                    f"{EXTRA_ARGS_KEY}.{name}", f"{message}; allowed: {allowed}", "unsupported_model"
                )

    def _check_softmax(self, config: CompressionConfig) -> None:
        """Refuses parts that compute attention otherwise than the model does."""
        for kind in PARTS:
            part = getattr(config.policy, kind)
            if self.shape.caps_logits and not part.takes_cap:
                trait = "soft-caps its attention logits"
            elif self.shape.has_sinks and not part.takes_sinks:
                trait = "has attention sinks"
            else:
                continue
            message = f"{part.name!r} computes attention in another way than the model, which {trait}"
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.{kind}", f"{message}; allowed: another {kind}", "unsupported_model"
            )

    def _check_rotation(self, config: CompressionConfig) -> None:
        """Refuses what needs RoPE undone, for a model whose RoPE cannot be."""
        if self.shape.rotation_obstacle is None:
            return
        if config.positions == "cache":
            message = f"{config.positions!r} needs keys turned, but the model {self.shape.rotation_obstacle}"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.positions", f"{message}; allowed: 'text'", "unsupported_model")
        for kind in PARTS:
            part = getattr(config.policy, kind)
            if part.needs_rotation:
                message = (
                    f"{part.name!r} needs keys as they were before RoPE, but the model {self.shape.rotation_obstacle}"
                )
                raise CompressionError(
                    f"{EXTRA_ARGS_KEY}.{kind}", f"{message}; allowed: another {kind}", "unsupported_model"
                )

    def _check_positions(self, config: CompressionConfig, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuses requests that would outlast the model's positions although they count entries."""
        most = self.shape.num_positions
        if config.positions == "text" or most is None:
            return
        if (count := most_positions(config, num_prompt_tokens, max_tokens, self.block_size)) > most:
            message = (
                f"{config.positions!r} comes to {count} positions at once, and the model has {most}; allowed: prefill "
                "in chunks, decode 'bounded', or a smaller budget, chunk, interval or number of tokens"
            )
            raise CompressionError(f"{EXTRA_ARGS_KEY}.positions", message, "too_many_positions")

    def _check_hidden_states(self, tracker: Tracker) -> None:
        """Refuses trackers that need hidden states, or predictions from them, where there are none."""
        obstacle = self.shape.hidden_states_obstacle
        if tracker.predicts_scores and not self.shape.has_surrogate:
            message = (
                f"{tracker.name!r} needs a KVzap model, and the server has none; allowed: another tracker, or on "
                "servers started with --kvzap and a model that is published for the served one, or trained by "
                "vllm-kvmerge train-kvzap"
            )
            raise CompressionError(f"{EXTRA_ARGS_KEY}.tracker", message, "unsupported_model")
        if obstacle is not None and (tracker.predicts_scores or tracker.normalizes):
            field = "tracker" if tracker.predicts_scores else "normalized"
            message = f"hidden states cannot be seen, because the server {obstacle}; allowed: with --enforce-eager"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.{field}", message, "unsupported_model")

    def _check_repetition(self, config: CompressionConfig, context: int) -> None:
        """Refuses contexts that cannot be repeated, a chunk at a time, after themselves."""
        if context <= config.resolve_budget(context):
            return
        tracker = config.policy.tracker
        for name, value in tracker:
            if isinstance(value, list) and value and max(value) >= self.num_token_ids:
                raise CompressionError(
                    f"{EXTRA_ARGS_KEY}.{name}",
                    f"the model has no token {max(value)}; allowed: 0 to {self.num_token_ids - 1}",
                    "invalid_value",
                )
        if self.max_num_seqs < 2:
            message = "the context is repeated beside the request; allowed: on servers with --max-num-seqs of 2 or more"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.tracker", message, "not_allowed")
        # One token more, which vLLM samples.
        most = self.max_model_len - 1
        num_repeated = tracker.num_repeated(context)
        if context + num_repeated > most:
            longest = _most(0, context, lambda length: length + tracker.num_repeated(length) <= most)
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.chunk_size",
                f"repeating a context of {context} tokens takes {num_repeated} more, and the model reads {most}; "
                f"allowed: smaller chunks, or contexts of up to {longest or 0} tokens",
                "too_long_to_repeat",
            )

    def _check_external(self, total: int) -> None:
        """Refuses requests whose complete cache has no room outside the pool."""
        if self.external_bytes(total) > self.max_external_bytes:
            most = self.max_external_bytes // self.external_bytes(self.block_size) * self.block_size
            raise CompressionError(
                f"{EXTRA_ARGS_KEY}.refresh",
                f"the complete cache of {total} tokens, prompt and max_tokens, takes "
                f"{_mebibytes(self.external_bytes(total))} outside the pool, more than the server's "
                f"--external-cache-bytes of {_mebibytes(self.max_external_bytes)}; allowed: up to {most} tokens",
                "no_external_room",
            )

    def _check_memory(self, config: CompressionConfig, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuses queries that are kept, and work on a single KV head, which cannot be divided, beyond the limit."""
        rings = self.ring_bytes(config.query_window, num_prompt_tokens + max_tokens)
        what, num_bytes, smaller = "its newest queries", rings, "smaller windows of queries"
        if rings <= self.max_bytes:
            num_entries = most_entries(config, num_prompt_tokens, max_tokens, self.block_size)
            budget = config.resolve_budget(config.resolve_context(num_prompt_tokens))
            sizes = self.shape.head_size, self.shape.group_size, self.shape.hidden_size
            shape = HeadShape(num_entries, min(budget, num_entries), *sizes)
            num_bytes = 4 * config.policy.held(shape)
            largest = max(config.policy.parts, key=lambda part: held_by(part, shape))
            what = f"compressing {num_entries} entries of one KV head, most of it {label(largest)},"
            smaller = "smaller windows of queries, shorter prompts, another budget or policy"
        if num_bytes > self.max_bytes:
            message = f"{what} would take {_mebibytes(num_bytes)}, more than {_mebibytes(self.max_bytes)}"
            allowed = f"{smaller}, or more by the server's option --max-compaction-bytes"
            raise CompressionError(EXTRA_ARGS_KEY, f"{message}; allowed: {allowed}", "too_expensive")

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
