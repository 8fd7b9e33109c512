"""vLLM's scheduler with compression: carries out each request's ``schedule``, step by step."""

import time
from dataclasses import replace
from operator import attrgetter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.accounting import Accounts
from vllm_kvmerge.engine.arguments import plugin_config, request_limits
from vllm_kvmerge.engine.blocks import WINDOW_SPECS, MergeableAttentionManager, compressed_group, window_blocks
from vllm_kvmerge.engine.connectors import HiddenRequests
from vllm_kvmerge.engine.contexts import CONTEXT_KEY, ContextStore
from vllm_kvmerge.engine.failures import FailedRequests, as_bad_request, cannot_be_spelled
from vllm_kvmerge.engine.fronts import FrontCache
from vllm_kvmerge.engine.known_scores import KnownScores
from vllm_kvmerge.engine.metrics import (
    CacheGauges,
    count_compression,
    count_freed,
    count_generated,
    count_not_offloaded,
    count_refresh,
    count_relief,
    count_request,
)
from vllm_kvmerge.engine.plan import (
    NO_REPORT,
    NO_STEP,
    CompressionPlan,
    CompressionReport,
    CompressionStep,
    Failure,
    FrontReport,
    FrontSize,
    Kind,
    PromptWindow,
    Segments,
    attach,
    attached_report,
    attached_step,
)
from vllm_kvmerge.engine.poison import FreedBlocks
from vllm_kvmerge.engine.prefix_keys import PrefixKeys
from vllm_kvmerge.engine.pressure import Pressure
from vllm_kvmerge.engine.repetition import RepeatingRequest
from vllm_kvmerge.engine.schedule import KeptBytes, RequestCompression, cdiv
from vllm_kvmerge.engine.served_model import EngineModel
from vllm_kvmerge.engine.sharing import ContextSharing
from vllm_kvmerge.engine.spreading import LEAST_SECONDS, STEP_SECONDS, Pace, SpreadCompression
from vllm_kvmerge.engine.support import check_config
from vllm_kvmerge.engine.usage import CacheSize
from vllm_kvmerge.policies.errors import PartError, label
from vllm_kvmerge.request.limits import KEPT_SHARE
from vllm_kvmerge.request.parameters import (
    EXTRA_ARGS_KEY,
    FULL,
    CompressionConfig,
    CompressionError,
    parse_compression,
)

_new_tokens = attrgetter("new_token_ids")


class CompressionSchedulerMixin(Scheduler):
    """Adds compression to vLLM's scheduler; a request that is not compressed has no ``RequestCompression``."""

    dynamic_sd_lookup: list[int] | None
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_config(self.vllm_config)
        steps = self.vllm_config.scheduler_config
        if not steps.enable_chunked_prefill:
            # With drafts vLLM notes the former limit of a step before its CPU platform raises it for latents (MLA): a
            # longer prompt, which cannot be cut, would wait for ever.
            self.max_num_scheduled_tokens = max(self.max_num_scheduled_tokens, steps.max_num_batched_tokens)
        coordinator, group = self.kv_cache_manager.coordinator, compressed_group(self.kv_cache_config)
        self._managers = coordinator.single_type_managers
        manager = self._managers[group]
        assert isinstance(manager, MergeableAttentionManager)
        self._manager = manager
        manager.windows = [one for one in self._managers if type(one.kv_cache_spec) in WINDOW_SPECS]
        for one in self._managers:
            if isinstance(one.kv_cache_spec, AttentionSpec):
                one._record_new_block_ids = True  # blocks that a compressed request wrote may go to any layers
        self._hooks = [compat.hash_blocks_of(coordinator, manager.hashes_blocks_of)]
        self._default = plugin_config(self.vllm_config).default
        num_slots = (self.kv_cache_config.num_blocks - 1) * manager.block_size
        windows = window_blocks(self.kv_cache_config, self.vllm_config)
        # vLLM's own number is the smallest of all groups, which may be that of states.
        limits = replace(request_limits(self.vllm_config), block_size=manager.block_size)
        self._limits = replace(limits, pool_tokens=num_slots, window_blocks=windows)
        self._model = EngineModel(self.vllm_config.model_config)
        self._engine = self.parallel_config.data_parallel_index
        cache = self.kv_cache_config
        # Groups of layers have the same memory: a block is one group's at a time.
        bytes_per_block = cache.kv_cache_tensors[0].size // cache.num_blocks
        self._num_workers = self.parallel_config.tensor_parallel_size
        self._bytes_per_block = bytes_per_block * self._num_workers
        self._compressions: dict[str, RequestCompression] = {}
        self._next_at: dict[str, tuple[Segments, int | None]] = {}
        """By request ``_next_compression``, and the segments that it is of."""
        self._due: list[str] = []
        """Requests whose compression is due, longest wait first."""
        self._spread: dict[str, SpreadCompression] = {}
        """Compressions that are carried out in several steps, by request: one at a time."""
        self._repeating: dict[str, RepeatingRequest | None] = {}
        """The internal request at work, by the one whose context it repeats; None once the last has been scheduled, or
        scores have been recalled."""
        self._pace = Pace(self._limits.num_heads)
        self._refused: dict[str, str] = {}
        """Why parts are not used again, by kind and name."""
        self._known_scores = KnownScores(self._limits.max_bytes if self.kv_cache_manager.enable_caching else 0)
        self._orphans: list[str] = []
        """Internal requests that nobody needs any more."""
        self._reported: dict[str, dict[int, FrontReport]] = {}
        """By request, and by the number of tokens that it had then."""
        self._unreported: dict[str, int] = {}
        """Blocks that compressions freed whose workers have not reported yet, by request; negative: that they took."""
        self._num_drafts: dict[str, int] = {}
        """Tokens of the step that have yet to be verified, by request."""
        self._is_small = self._limits.most_generated(None, 1) + 1 < self.max_model_len
        """The pool does not hold what the model can read."""
        if self.num_spec_tokens and self.dynamic_sd_lookup is None:
            # A number for each size of batch, all the same, has vLLM schedule no drafts that nobody has made: such
            # padding, for CUDA graphs, could not be cut where a compression is due.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        options = plugin_config(self.vllm_config)
        hash_function = get_hash_fn_by_name(self.cache_config.prefix_caching_hash_algo)
        self._keys = PrefixKeys(hash_function, self._manager.block_pool.hash_block_size)
        if self._limits.shares_contexts:
            pool, max_bytes = self._manager.block_pool, self._limits.max_bytes
            self._manager.fronts = FrontCache(pool, group, self._keys, KEPT_SHARE * max_bytes)
        # Beside them there is room for the longest request, which would otherwise wait for ever.
        longest = cdiv(self.max_model_len, manager.block_size)
        longest += cdiv(self._limits.window_slots(self.max_model_len), manager.block_size)
        others = cache.num_blocks - 1 - longest
        most = max(0, min(int(options.contexts_share * (cache.num_blocks - 1)), others))
        self._contexts = ContextStore(self._manager, self._bytes_per_block, most, hash_function)
        self._accounts = Accounts(self._bytes_per_block, self._size)
        self._sharing = ContextSharing(self._manager, self._compressions, self._engine, self._accounts)
        watermark = self.kv_cache_manager.watermark_blocks
        self._pressure = Pressure(
            self._manager,
            self._compressions,
            self.max_num_scheduled_tokens,
            watermark,
            num_drafts=self.num_spec_tokens,
            is_async=isinstance(self, AsyncScheduler),
        )
        self._hooks.append(compat.watch_asked_blocks(coordinator, self._pressure.note_asked))
        self._shortcuts = self._to_vllm()
        self._are_hooked = True
        self._hidden = HiddenRequests(group)
        if self.connector is not None:
            compat.keep_from_connector(self.connector, lambda request: request.request_id in self._hidden)
        self._freed = FreedBlocks(self._manager.block_pool, self._manager) if options.debug_poison_freed else None
        self._kept_bytes = KeptBytes()
        self._external_bytes = KeptBytes()
        self._failed = FailedRequests(self._engine)
        self._gauges = CacheGauges(self._engine, self._bytes_per_block)

    # Requests, as they arrive, are preempted and end.

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            extra = (request.sampling_params.extra_args if request.sampling_params else None) or {}
            try:
                config = self._requested(request, extra.get(EXTRA_ARGS_KEY))
                compression = self._resolve(request, config)
                if (asked := extra.get(CONTEXT_KEY)) is not None:
                    self._contexts.ask(request, asked, compression)
                self._accounts.begin(request, extra, config, compression)
            except Exception as error:  # this request alone ends, before its first step
                self._failed.add(request.request_id, error)
            else:
                if compression is not None:
                    self._compressions[request.request_id] = compression
                    if self.connector is not None:
                        self._hidden.add(request.request_id)
                        count_not_offloaded(compression.config.name, self._engine)
        super().add_request(request)

    def _requested(self, request: Request, asked: Any) -> CompressionConfig | None:
        """What the request asks for, for this model; None for no compression. asked: its ``kv_compression``."""
        config = parse_compression(self._default if asked is None else asked)
        if request.resumable:
            # Its prompt grows by turns, which limits do not cover, and vLLM takes tokens back between them.
            if asked is not None and config is not None:
                raise CompressionError(EXTRA_ARGS_KEY, "streamed prompts are not compressed; allowed: full", "streamed")
            config = None
        parts = [] if config is None else [label(part) for part in config.policy.parts]
        count_request(config.name if config else FULL, self._engine, parts)
        return None if config is None else config.for_model(self._model)

    def _resolve(self, request: Request, config: CompressionConfig | None) -> RequestCompression | None:
        """The request's compression in numbers of tokens, None for none."""
        if config is None:
            self._limit_to_pool(request, None)
            return None
        # A server's front end has checked this; offline there is none.
        config.check_prompt(request.num_prompt_tokens)
        self._limits.check(config, request.num_prompt_tokens, request.max_tokens)
        for part in map(label, config.policy.parts):
            if part in self._refused:
                why = f"{part} is refused until the server is restarted: {self._refused[part]}"
                raise CompressionError(EXTRA_ARGS_KEY, f"{why}; allowed: other parts", "part_refused")
        if config.never_compresses(request.num_prompt_tokens, request.max_tokens):
            self._limit_to_pool(request, None)
            return None  # plain attention is exact and cheaper
        self._limit_to_pool(request, config)
        compression = RequestCompression.of(config, request.num_prompt_tokens, request.max_tokens, self._limits)
        if compression.repeats_context:
            self._check_repetition(request, compression)
        # What it has generated need not fit beside its prompt when it is computed again.
        room = (self._limits.pool_tokens or self.max_model_len) - self._limits.window_slots(compression.total)
        if compression.chunk is not None:
            room = self._limits.slots(config, request.num_prompt_tokens)
        self._manager.most_tokens[request.request_id] = room
        return compression

    def _limit_to_pool(self, request: Request, config: CompressionConfig | None) -> None:
        """Has a request end with what fits into the pool, as vLLM has it end with what the model can read. Raises
        CompressionError if its prompt does not fit."""
        if request.pooling_params is None:
            self._limits.check_room(config, request.num_prompt_tokens)
            request.max_tokens = min(request.max_tokens, self._limits.most_generated(config, request.num_prompt_tokens))

    def _check_repetition(self, request: Request, compression: RequestCompression) -> None:
        """Raises CompressionError if the request's context cannot be repeated, whatever else runs."""
        has_others = request.prompt_embeds is not None or request.mm_features
        compression.config.check_tokens_alone(request.prompt_token_ids is not None and not has_others)
        num_tokens = compression.context + compression.config.policy.tracker.num_repeated(compression.context)
        # The context's last block is not shared if it is not full. Both requests have windows.
        block_size = self._manager.block_size
        needed = cdiv(num_tokens, block_size) + 1 + 2 * self._limits.window_slots(num_tokens) // block_size
        pool = self.kv_cache_config.num_blocks - 1 - self._contexts.num_blocks
        if compression.context > compression.budget and needed > pool:
            message = f"repeating {compression.context} tokens takes {needed} blocks; allowed: up to {pool}"
            raise CompressionError(EXTRA_ARGS_KEY, message, "too_long_to_repeat")

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._accounts.note(request)
        self._drop_spread(request)
        self._release_kept(request)
        if self._awaits_pressure(request):
            self._reported.pop(request.request_id, None)  # it will not go through the same compressions again
        self._stop_repeating(request)
        self._forget_uncomputed(request)
        super()._preempt_request(request, *args, **kwargs)

    def _forget_uncomputed(self, request: Request) -> None:
        """Takes blocks that nothing has been computed for out of the prefix cache. vLLM puts a step's blocks in when it
        gives them out, and may then give the step's room to a request with a higher priority (vLLM issue 57580)."""
        blocks = [
            block
            for manager in self._managers
            for block in manager.req_to_blocks.get(request.request_id, [])[
                request.num_computed_tokens // manager.block_size :
            ]
            if block.block_hash is not None and block.ref_cnt == 1
        ]
        self.kv_cache_manager.block_pool.evict_blocks({block.block_id for block in blocks})

    def _release_kept(self, request: Request) -> None:
        for kept in (self._kept_bytes, self._external_bytes):
            kept.release(request.request_id)

    def _stop_repeating(self, request: Request) -> None:
        # vLLM may be going through the queues just now, so the internal request ends a little later.
        if (internal := self._repeating.pop(request.request_id, None)) is not None:
            self._orphans.append(internal.request_id)

    def _end_orphans(self) -> None:
        if self._orphans:
            orphans, self._orphans = self._orphans, []
            super().finish_requests(orphans, RequestStatus.FINISHED_ABORTED)

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        finished = super().finish_requests(*args, **kwargs)
        self._end_orphans()
        return [request for request in finished if not isinstance(request, RepeatingRequest)]

    def _drop_spread(self, request: Request) -> bool:
        """Drops the request's compression if it is under way; whether it was."""
        spread = self._spread.pop(request.request_id, None)
        if spread is not None:
            self._sharing.drop(spread.plan)
        return spread is not None

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._accounts.note(request)
        was_spread = self._drop_spread(request)
        self._release_kept(request)
        self._stop_repeating(request)
        if self._contexts.is_asked(request.request_id):
            front = self._sharing.front_of(request)
            self._contexts.end(request, front, self._compressions.get(request.request_id))
        self._sharing.end(request, is_whole=not was_spread)
        self._compressions.pop(request.request_id, None)
        self._due = [one for one in self._due if one != request.request_id]
        self._next_at.pop(request.request_id, None)
        self._manager.most_tokens.pop(request.request_id, None)
        self._reported.pop(request.request_id, None)
        self._unreported.pop(request.request_id, None)
        params, *others = super()._free_request(request, *args, **kwargs)
        params = self._accounts.end(request, params)
        if cannot_be_spelled(request, self.structured_output_manager.backend):
            params = as_bad_request(params)
        return params, *others

    # A KV connector, if there is one.

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        self._hidden.note_begun(scheduler_output)
        return super()._build_kv_connector_meta(connector, self._hidden.plain_part(scheduler_output))

    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return (False, None) if request.request_id in self._hidden else super()._connector_finished(request)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        has_failed = request.request_id in self.failed_recving_kv_req_ids
        super()._update_waiting_for_remote_kv(request)
        if has_failed and request.num_computed_tokens and not self.needs_kv_cache_zeroing:
            # What a load leaves out is not zeroed when blocks are given to it, and is computed now.
            self.kv_cache_manager.record_blocks_for_zeroing(request.request_id, request.num_computed_tokens)

    def _failed_sharers(self, result: ModelRunnerOutput, output: SchedulerOutput) -> dict[str, Failure]:
        """Compressed requests that began with blocks of a plain one's load that has failed: what they hold by now is
        made of them. result, output: of the same step."""
        loads = result.kv_connector_output
        spoilt = self._hidden.spoilt(loads.invalid_block_ids if loads else set(), output)
        return dict.fromkeys(spoilt, Failure("a KV connector did not load blocks that the request began with"))

    def _to_vllm(self) -> list[compat.Hook]:
        """Hooks that are on while ``_hooks`` are off: vLLM's own methods, without what ours do before and after."""
        num_blocks = super(MergeableAttentionManager, self._manager).get_num_blocks_to_allocate
        hooks = [compat.Hook(self._manager, "get_num_blocks_to_allocate", num_blocks, is_on=False)]
        if not self.num_spec_tokens:  # ours says where a plain request's drafts end, too
            lookahead = super()._reserve_prefill_lookahead
            hooks.append(compat.Hook(self, "_reserve_prefill_lookahead", lookahead, is_on=False))
        return hooks

    # Scheduling of a step: first tokens, by vLLM, then the compressions that follow them.

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._end_failed()
        self._end_orphans()  # of requests preempted between steps, as by a reset of the prefix cache
        self._contexts.expire()
        self._put_repetitions_first()
        # A step takes blocks for new tokens, and the last of each request that is not full.
        self._manager.evict_superseded_first(
            cdiv(self.max_num_scheduled_tokens, self._manager.block_size) + self.max_num_running_reqs
        )
        self._pressure.begin_step()
        if self._freed is not None:
            self._freed.begin_step()
        are_asked = bool(self._compressions or self._repeating)
        if are_asked != self._are_hooked:
            self._are_hooked = are_asked
            for hook in self._hooks:
                hook.switch(are_asked)
            for hook in self._shortcuts:
                hook.switch(not are_asked)
        output = super().schedule(*args, **kwargs)
        self._num_drafts = {one: len(drafts) for one, drafts in output.scheduled_spec_decode_tokens.items()}
        if self._is_plain():
            attach(output, None)
            self._set_gauges(False)
            return output
        self._end_orphans()
        if self._kept_bytes or self._external_bytes:
            # Room is reserved before vLLM looks for blocks: a request that found none must not keep others waiting.
            running = {request.request_id for request in self.running}
            for kept in (self._kept_bytes, self._external_bytes):
                kept.keep(running)
        self._accounts.begin_step(self.running)
        step = CompressionStep()
        step.adoptions = self._sharing.adoptions(self.requests)
        for request_id in step.adoptions:
            self._kept_bytes.shrink(request_id, self._compressions[request_id].ring_bytes)
            self._reported.pop(request_id, None)  # of a course that it has left
        stuck = list[Request]()
        if self._compressions:  # plain requests do not pay for others
            stuck = self._repeat_contexts(output, step)
            step.outputs = self._sharing.new_contexts(output.num_scheduled_tokens, self.requests)
            self._compress_due(step, output)
        step.forgotten_scores = self._known_scores.take_forgotten()
        is_idle = not output.num_scheduled_tokens and self.pause_state != PauseState.PAUSED_ALL
        if stuck and len(stuck) == len(self.running) and is_idle:
            # Deadlock: nothing runs, and what they wait for finds no room, or is behind others that find none.
            self.running.remove(stuck[-1])
            self._preempt_request(stuck[-1], time.monotonic())
        self._end_orphans()
        self._relieve_pressure(step)
        self._manager.release_retired()
        step.turns = self._sharing.take_turns()
        if self._manager.fronts is not None:
            step.forgotten = self._manager.fronts.take_forgotten()
        compressed = {plan.request_id: plan.is_refresh for plan in step.plans}
        step.usage = self._accounts.end_step(self.running, compressed)
        if self._freed is not None:
            step.poisoned = self._freed.take()
        attach(output, None if step == NO_STEP else step)
        self._set_gauges(bool(step.plans))
        return output

    def _is_plain(self) -> bool:
        """Whether a step that vLLM has scheduled has nothing of ours: no request is compressed or reports its cache,
        and there is nothing to tell workers. Most steps of most servers."""
        fronts = self._manager.fronts
        return not (
            self._compressions
            or self._repeating
            or self._orphans
            or self._accounts.has_steps
            or self._kept_bytes
            or self._external_bytes
            or self._manager.has_retired
            or self._sharing.has_turns
            or self._known_scores.has_forgotten
            or (fronts is not None and fronts.has_forgotten)
            or self._freed is not None
        )

    def _set_gauges(self, has_compressed: bool) -> None:
        if not self.log_stats or not self._gauges.are_due(len(self.running), has_compressed):
            return
        users = [one for one in self.running if not isinstance(one, RepeatingRequest)]
        self._gauges.update([(self._policy(one.request_id), self._size(one)) for one in users])
        if self._manager.fronts is not None:
            fronts, contexts = self._manager.fronts, self._contexts
            self._gauges.update_contexts(len(fronts), fronts.num_blocks, len(contexts), contexts.num_blocks)

    def _compress_due(self, step: CompressionStep, output: SchedulerOutput) -> None:
        """Adds the compressions due after ``step``, and parts of those that are spread."""
        is_awaited = self._is_awaited(output)
        room = self._pace.room(is_awaited)
        waiting, seconds = self._plan_due(step, is_awaited, room)
        while waiting and not output.num_scheduled_tokens and not step.plans and not self._spread:
            # Deadlock: requests that share their blocks wait for room to copy them. One has to go.
            self.running.remove(waiting[-1])
            self._preempt_request(waiting[-1], time.monotonic())
            waiting, seconds = self._plan_due(step, is_awaited, room)
        for spread in list(self._spread.values() if room else ()):
            part = spread.next_part(max(LEAST_SECONDS, room - seconds), self._pace) if is_awaited else None
            if part is None:
                self._complete(spread, step)
            else:
                step.parts.append(part)
        step.is_awaited = is_awaited and bool(step.plans or step.parts)

    def call_contexts(self, text: str) -> str:
        """``ContextStore.call``."""
        return self._contexts.call(text)

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        # Even if blocks are in use: the model's weights may be about to change.
        self._known_scores.clear()
        if not self.running or reset_running_requests:
            self._contexts.clear()
        if reset_running_requests:
            for request in self.running:
                self._drop_spread(request)
            self._sharing.clear()
        return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._repeating:
            stats.num_running_reqs -= sum(isinstance(one, RepeatingRequest) for one in self.running)
            stats.num_waiting_reqs -= sum(isinstance(one, RepeatingRequest) for one in self.waiting)
        return stats

    def _put_repetitions_first(self) -> None:
        """Puts waiting internal requests before users', which may have been preempted since and may need their room."""
        repetitions = [one for one in self._repeating.values() if one and one.status != RequestStatus.RUNNING]
        if repetitions:
            self.waiting.remove_requests(repetitions)
            self.waiting.prepend_requests(repetitions)

    def _repeat_contexts(self, output: SchedulerOutput, step: CompressionStep) -> list[Request]:
        """Has contexts that have been computed repeated, a chunk at a time, before they are compressed.

        Adds to ``step`` the chunks that it repeats. Returns the requests whose internal ones found no room in it,
        and those that wait for scores of others.
        """
        stuck = []
        for request in list(self.running):
            compression, due_at = self._compressions.get(request.request_id), self._next_compression(request)
            if compression is None or due_at is None or not compression.repeats_context:
                continue
            if request.num_computed_tokens < due_at:
                continue
            if request.request_id not in self._repeating:
                if not self._share_scores(request, compression, step):
                    stuck.append(request)
                continue
            internal = self._repeating[request.request_id]
            if internal is None:
                continue
            if internal.request_id not in output.num_scheduled_tokens:
                if not internal.num_in_flight_tokens and not output.preempted_req_ids:
                    stuck.append(request)
                continue
            step.repetitions[internal.request_id] = internal.chunk
            if internal.is_scheduled:
                # Its blocks are free for what this step's compressions write, after its forward pass.
                super().finish_requests(internal.request_id, RequestStatus.FINISHED_ABORTED)
                self._repeat(request, compression, internal.key, internal.index + 1)
                if self._repeating[request.request_id] is None and internal.key is not None:
                    number = self._known_scores.keep(internal.key, compression.score_bytes)
                    if number is not None:
                        step.kept_scores[request.request_id] = number
        return stuck

    def _share_scores(self, request: Request, compression: RequestCompression, step: CompressionStep) -> bool:
        """Recalls the scores of a request's context that has been computed, or has it repeated.

        False if another request has the same context repeated just now, for which this one waits.
        """
        tracker, reads = compression.config.policy.tracker, not request.skip_reading_prefix_cache
        key = self._keys.of(request, compression.context, "repetition", tracker.name, tracker.model_dump_json())
        number = self._known_scores.find(key) if reads and key is not None else None
        if number is not None:
            step.recalled_scores[request.request_id] = number
            self._repeating[request.request_id] = None
            return True
        if reads and key is not None and self._will_be_known(key, compression.score_bytes):
            return False
        self._repeat(request, compression, key, 0)
        return True

    def _will_be_known(self, key: bytes, num_bytes: int) -> bool:
        is_repeated = any(internal is not None and internal.key == key for internal in self._repeating.values())
        return is_repeated and self._known_scores.has_room(num_bytes)

    def _repeat(self, request: Request, compression: RequestCompression, key: bytes | None, index: int) -> None:
        """Queues the internal request that repeats a chunk of the request's context, if there is such a chunk."""
        internal = RepeatingRequest.of(request, compression.config.policy.tracker, key, compression.context, index)
        self._repeating[request.request_id] = internal
        if internal is not None:
            self.requests[internal.request_id] = internal
            if self.connector is not None:
                self._hidden.add(internal.request_id)
            self.waiting.prepend_request(internal)

    def _next_compression(self, request: Request) -> int | None:
        """Number of computed tokens at which the request is compressed next; None: never."""
        compression = self._compressions.get(request.request_id)
        if compression is None:
            return None
        segments = self._manager.segments_of(request.request_id)
        known = self._next_at.get(request.request_id)
        if known is None or known[0] is not segments:  # asked several times in each step
            known = self._next_at[request.request_id] = segments, compression.next_compression(segments)
        return known[1]

    def _get_local_prefix_cache_hit(
        self, request: Request, *longest_hit: int | None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        if isinstance(request, RepeatingRequest):
            parent, num_shared = request.parent.request_id, request.context // self.block_size * self.block_size
            shared = tuple(one.req_to_blocks[parent][: num_shared // one.block_size] for one in self._managers)
            return self.kv_cache_manager.create_kv_cache_blocks(shared), num_shared, 0, False
        # vLLM bounds hits if it returns the experts of all tokens: of those in a front, they are not known.
        is_bounded = any(bound is not None for bound in longest_hit)
        if not is_bounded and (front := self._sharing.first_front(request)) is not None:
            # The last token of all is computed in any case: what comes after it is not part of a front.
            num_hit_tokens = min(front.num_tokens, request.num_tokens - 1)
            compression = self._compressions[request.request_id]
            writes = compression.config.tracks(is_partial=compression.is_in_context(front.segments))
            rows = self._manager.offer(request.request_id, front, writes, num_hit_tokens)
            needed = self._manager.num_to_begin(request.request_id, rows, request.num_tokens)
            # With nothing else running, a front that does not fit would be waited for for ever.
            if self.running or needed <= self._manager.block_pool.get_num_free_blocks():
                return self.kv_cache_manager.create_kv_cache_blocks(rows), num_hit_tokens, 0, False
        self._manager.offer(request.request_id, None)
        blocks, num_hit_tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request, *longest_hit)
        due_at = self._next_compression(request)
        if due_at is not None:
            longest = self._compressions[request.request_id].longest_prefix(due_at)
            allowed = longest // self.block_size * self.block_size
            if num_hit_tokens > allowed:
                # Anew: a shorter hit has other blocks within a window.
                found, num_hit_tokens, _ = self.kv_cache_manager.coordinator.find_longest_cache_hit(
                    request.block_hashes, allowed
                )
                blocks = self.kv_cache_manager.create_kv_cache_blocks(found)
            # Where the next one with this context may begin, layers with a window keep theirs in the prefix cache.
            boundary = min(boundary or allowed, allowed)
        return blocks, num_hit_tokens, boundary, diverged

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        # vLLM asks here where a chunk may end. A context is compressed before the rest of the prompt is computed. A
        # preempted request recomputes its prompt and generated tokens, in chunks that end where it was compressed the
        # first time, so that its cache comes out the same.
        num_new_tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if num_new_tokens > 1:
            num_certain = request.num_tokens + request.num_output_placeholders - num_computed_tokens
            if num_new_tokens > num_certain:
                num_new_tokens = max(num_certain, min(num_new_tokens, self._draft_end(request) - num_computed_tokens))
        compression = self._compressions.get(request.request_id)
        if compression is None:
            return num_new_tokens
        if request.request_id in self._spread:
            return 0
        due_at = self._next_compression(request)
        if due_at is None and not compression.config.awaits_pressure:
            return num_new_tokens
        if not self._leaves_room_to_repeat(request, compression):
            return 0
        if not self._reserve_kept(request.request_id, compression):
            return 0
        if due_at is None:
            most = self._limits.pool_tokens or self.max_model_len
            return self._pressure.fitting(request, num_computed_tokens, num_new_tokens, most)
        # A request whose compression is due but found no room computes nothing until it has been compressed.
        num_new_tokens = min(num_new_tokens, max(0, due_at - num_computed_tokens))
        last_block, end = due_at // self.block_size * self.block_size, num_computed_tokens + num_new_tokens
        if compression.repeats_context and num_computed_tokens < last_block < end < due_at:
            # Internal requests begin at this block: windows must not have moved on before the context's end.
            return last_block - num_computed_tokens
        return num_new_tokens

    def _draft_end(self, request: Request) -> int:
        """Number of tokens that a step may come to if some of them are drafts.

        A compression follows a step whose tokens are all certain, so one token before it is left to such a step.
        """
        compression, total = self._compressions.get(request.request_id), request.num_prompt_tokens + request.max_tokens
        if compression is None:
            # vLLM lets drafts go on behind the last token that is asked for, where a small pool has no room.
            return total - 1 if self._is_small else self.max_model_len
        if not compression.takes_drafts:
            return 0
        due_at = self._next_compression(request)
        return total - 1 if due_at is None else min(total, due_at) - 1

    def _leaves_room_to_repeat(self, request: Request, compression: RequestCompression) -> bool:
        """False if a request must wait so that those whose contexts are repeated do not take all places to run."""
        if not self._awaits_repetition(request) or request.status == RequestStatus.RUNNING:
            return True
        return sum(map(self._awaits_repetition, self.running)) < self.max_num_active_reqs - 1

    def _awaits_repetition(self, request: Request) -> bool:
        compression = self._compressions.get(request.request_id)
        return compression is not None and compression.repeats_context and self._next_compression(request) is not None

    def _is_scored(self, request: Request) -> bool:
        """False if the request's context has to be repeated before its next compression."""
        if not self._compressions[request.request_id].repeats_context:
            return True
        return request.request_id in self._repeating and self._repeating[request.request_id] is None

    def _reserve_kept(self, request_id: str, compression: RequestCompression) -> bool:
        """Reserves the request's memory outside the pool; False if it must wait for that of others."""
        limits, num_bytes = self._limits, compression.ring_bytes + compression.score_bytes
        return self._external_bytes.reserve(
            request_id, compression.external_bytes, limits.max_external_bytes
        ) and self._kept_bytes.reserve(request_id, num_bytes, limits.kept_bytes)

    def _get_new_block_ids_to_zero(self) -> list[int] | None:
        new = self.kv_cache_manager.take_new_block_ids()
        unclean = self._manager.take_unclean(new)
        # Where vLLM zeroes all, any of them may hold a state of other layers.
        return (new if self.needs_kv_cache_zeroing else unclean) or None

    def _is_awaited(self, output: SchedulerOutput) -> bool:
        """True if requests are computed in this step whose next tokens wait for compressions of others."""
        return any(
            request.request_id in output.num_scheduled_tokens
            and not isinstance(request, RepeatingRequest)
            and ((due_at := self._next_compression(request)) is None or request.num_computed_tokens < due_at)
            for request in self.running
        )

    def _plan_due(self, step: CompressionStep, is_awaited: bool, room: float) -> tuple[list[Request], float]:
        """Adds to ``step`` the compressions due after it; returns the requests that found no room for theirs, and the
        seconds of the others. is_awaited: other requests wait for their next tokens. room: seconds that there are for
        compressions; 0: none are added.

        A step takes as many as fit, less what one that is spread gets, and at least one; a refresh alone. If other
        requests wait, a longer one is spread. The others are deferred to the next steps, longest wait first; until then
        their requests compute nothing.
        """
        due: dict[str, Request] = {}
        for request in self.running:
            due_at = self._next_compression(request)
            if due_at is not None:
                self._open_window(request, due_at, step)
                if request.num_computed_tokens >= due_at and self._is_scored(request):
                    due[request.request_id] = request
        waiting, seconds = list[Request](), 0.0
        self._due = list(dict.fromkeys([*(one for one in self._due if one in due), *due]))
        if not room:
            return waiting, seconds
        for request_id in list(self._due):
            request, segments = due[request_id], self._manager.segments_of(request_id)
            try:
                compression = self._compressions[request_id]
                reported = self._reported.get(request_id, {}).get(request.num_computed_tokens)
                new_front = compression.new_front(segments, request.num_computed_tokens, reported)
                kind, num_entries = self._kind(request)
                estimate = self._pace.seconds(kind, num_entries)
                is_refresh = compression.is_refresh(segments, request.num_computed_tokens)
            except PartError as error:
                self._failed.add(request_id, error)
                self._due.remove(request_id)
                continue
            is_spread = is_awaited and estimate > STEP_SECONDS and not self._ends_now(request)
            if is_spread and self._spread:
                continue  # one after the other: together, both would take as long as the longer one
            # A refresh has a step's time to itself: it moves the complete cache too, how fast is not known.
            is_alone = is_refresh or (step.plans and step.plans[0].is_refresh)
            left = room - seconds - (LEAST_SECONDS if self._spread else 0.0)
            if step.plans and (is_alone or (not is_spread and estimate > left)):
                break
            if self._plan(request, new_front, step, is_spread):
                seconds += 0.0 if is_spread else estimate
                self._due.remove(request_id)
            else:
                waiting.append(request)
        return waiting, seconds

    def _kind(self, request: Request) -> tuple[Kind, int]:
        """Kind of the request's compression, now, and entries per KV head before it."""
        compression, segments = self._compressions[request.request_id], self._manager.segments_of(request.request_id)
        num_entries = compression.num_entries(segments, request.num_computed_tokens)
        return (compression.config.text, num_entries.bit_length()), num_entries

    def _ends_now(self, request: Request) -> bool:
        """True if the request ends with the token of this step, so that its context's front would not come to be."""
        return request.num_computed_tokens + 1 >= request.num_prompt_tokens + request.max_tokens

    def _open_window(self, request: Request, due_at: int, step: CompressionStep) -> None:
        """Adds to ``step`` the queries that the request's first compression, due at ``due_at``, needs."""
        if request.request_id in self._manager.segments:
            return
        compression = self._compressions[request.request_id]
        start = compression.window_start(due_at)
        if start is not None:
            window = PromptWindow(start, compression.config.text, compression.query_window)
            step.windows[request.request_id] = window

    def _awaits_pressure(self, request: Request) -> bool:
        compression = self._compressions.get(request.request_id)
        return compression is not None and compression.config.awaits_pressure

    def _relieve_pressure(self, step: CompressionStep) -> None:
        """Adds to ``step`` the compressions that end a shortage of blocks: as many as fit into ``STEP_SECONDS``, and at
        least one."""
        if not self._compressions:
            return
        asleep = [
            request
            for request in self.running
            if self._awaits_pressure(request) and request.request_id not in self._spread
        ]
        if not asleep:
            return
        for request in asleep:
            compression = self._compressions[request.request_id]
            if compression.query_window and request.request_id not in self._manager.segments:
                window = PromptWindow(0, compression.config.text, compression.query_window)
                step.windows[request.request_id] = window
        first_waiting, seconds = self.waiting.peek_request() if self.waiting else None, 0.0
        for relief in self._pressure.reliefs(self.running, first_waiting, asleep, self._failed.add):
            request, compression = relief.request, self._compressions[relief.request.request_id]
            seconds += self._pace.seconds(*self._kind(request))
            if step.plans and seconds > STEP_SECONDS:
                break
            # Not spread: blocks are needed at once.
            if self._plan(request, relief.new_front, step, is_spread=False):
                count_relief(compression.config.name, self._engine)

    def _plan(self, request: Request, new_front: FrontSize, step: CompressionStep, is_spread: bool) -> bool:
        """Adds the request's compression to ``step``; False if there is no room to copy shared blocks. is_spread: it
        begins with this step and is spread over the next ones."""
        request_id, num_computed = request.request_id, request.num_computed_tokens
        compression, segments = self._compressions[request_id], self._manager.segments_of(request_id)
        kind = self._kind(request)
        is_refresh = compression.is_refresh(segments, num_computed)
        num_tokens = compression.covered(segments, num_computed)
        computed = self._manager.computed_blocks(request_id)
        self._accounts.note(request)
        turns_windows = compression.config.positions == "cache"
        relocation = self._manager.relocate(request_id, num_tokens, new_front, num_computed, turns_windows)
        if relocation is None:
            return False
        is_of_context = compression.is_in_context(segments)
        is_partial = is_of_context and num_computed < compression.context
        key, copies = self._sharing.plan(request, relocation.blocks, num_computed) if is_of_context else (None, [])
        # A prompt that is the context itself goes on in a chat's next one, which looks for exact blocks.
        is_superseding = key is not None and not is_partial and compression.context < request.num_prompt_tokens
        plan = CompressionPlan(
            request_id=request_id,
            compression=compression.config.text,
            front=segments.num_places,
            tail=segments.tail,
            num_tokens=num_tokens,
            budget=compression.budget,
            new_front=new_front.places,
            blocks=relocation.blocks,
            hole=relocation.hole,
            in_place=segments.are_compressed and relocation.in_place,
            share_blocks=new_front.share_blocks,
            has_pages=new_front.has_pages,
            may_shrink=new_front.may_shrink,
            # While a request generates, its tokens wait for none of them; without a next one there is no other time.
            settles_shares=is_of_context or not (segments.are_compressed or compression.config.decode == "bounded"),
            is_refresh=is_refresh,
            external_tokens=compression.total if compression.external_bytes else 0,
            num_computed=num_computed,
            is_partial=is_partial,
            is_rescored=compression.is_rescored(segments),
            key=key,
            copies=copies,
            windows=relocation.windows,
        )
        self._repeating.pop(request_id, None)
        superseded = computed if is_superseding else []
        spread = SpreadCompression(plan, segments, relocation.num_freed, *kind, superseded)
        self._spread[request_id] = spread
        if not is_spread:
            self._complete(spread, step)
        return True

    def _complete(self, spread: SpreadCompression, step: CompressionStep) -> None:
        """Adds a compression to ``step``, or the rest of it, if it has been under way."""
        plan, request_id = spread.plan, spread.plan.request_id
        del self._spread[request_id]
        step.plans.append(plan)
        self._manager.retire_read(request_id)
        self._manager.supersede(spread.superseded)
        compression = self._compressions[request_id]
        self._kept_bytes.shrink(request_id, compression.ring_bytes)  # the context's scores are no longer needed
        count_compression(compression.config.name, self._engine)
        if plan.may_shrink:
            self._unreported[request_id] = spread.num_freed
        else:
            self._count_freed(request_id, spread.num_freed)
        if plan.is_refresh:
            count_refresh(compression.config.name, self._engine)

    def _count_freed(self, request_id: str, num_blocks: int) -> None:
        # Where each head has a page that is not full, a compression may take a block more than it frees.
        num_blocks = max(0, num_blocks)
        count_freed(self._policy(request_id), self._engine, num_blocks, num_blocks * self._bytes_per_block)
        self._accounts.note_returned(request_id, num_blocks)

    # Outputs of a step.

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput, *args: Any, **kwargs: Any
    ) -> dict[int, EngineCoreOutputs]:
        report = attached_report(model_runner_output)
        if self.connector is not None:
            failures = report.failures | self._failed_sharers(model_runner_output, scheduler_output)
            report = replace(report, failures=failures)
        step = attached_step(scheduler_output)
        if report is not NO_REPORT:
            self._learn(report)
        for plan in step.plans:
            self._sharing.share(plan, report)
        # Before vLLM processes the step's tokens: those of failed requests must not reach their clients.
        self._end_failed()
        if step.usage:
            self._accounts.computed(step.usage)
        self._num_drafts = {}  # vLLM takes back those that were rejected
        policies = {request_id: one.config.name for request_id, one in self._compressions.items()}  # some end now
        outputs_by_client = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
        self._count_generated(outputs_by_client, policies)
        self._end_orphans()
        self._failed.tell(outputs_by_client)
        self._accounts.add_to(outputs_by_client)
        return outputs_by_client

    def _learn(self, report: CompressionReport) -> None:
        self._pace.learn(report.spent)
        for request_id, front in report.fronts.items():
            if request_id in self._compressions:  # otherwise it has ended
                self._reported.setdefault(request_id, {})[front.num_tokens] = front
                num_freed = self._manager.shrink_front(request_id, front)
                self._count_freed(request_id, num_freed + self._unreported.pop(request_id, 0))
        for request_id, progress in report.progress.items():
            if request_id in self._spread:
                self._spread[request_id].learn(progress)
        self._accounts.count(report)
        self._failed.update(report.failures)
        for failure in report.failures.values():
            if failure.is_last and failure.part is not None:
                self._refused[failure.part] = failure.message
                self._end_users(failure.part, failure)

    def _end_users(self, part: str, failure: Failure) -> None:
        """Ends requests that are still to be compressed by a part that is not used again."""
        for request_id, compression in self._compressions.items():
            request = self.requests[request_id]
            is_needed = self._awaits_pressure(request) or self._next_compression(request) is not None
            if is_needed and part in map(label, compression.config.policy.parts):
                self._failed.update({request_id: failure})

    def _count_generated(self, outputs_by_client: dict[int, EngineCoreOutputs], policies: dict[str, str]) -> None:
        """policies: of the compressed requests."""
        generated = dict[str, int]()
        for outputs in outputs_by_client.values():
            if not policies:
                generated[FULL] = generated.get(FULL, 0) + sum(map(len, map(_new_tokens, outputs.outputs)))
                continue
            for output in outputs.outputs:
                policy = policies.get(output.request_id, FULL)
                generated[policy] = generated.get(policy, 0) + len(output.new_token_ids)
        for policy, num_tokens in generated.items():
            count_generated(policy, self._engine, num_tokens)

    def _end_failed(self) -> None:
        if self._failed:
            self._failed.end(lambda ids: self.finish_requests(ids, RequestStatus.FINISHED_ERROR), self._policy)

    def _policy(self, request_id: str) -> str:
        compression = self._compressions.get(request_id)
        return compression.config.name if compression else FULL

    def _size(self, request: Request) -> CacheSize:
        request_id = request.request_id
        num_tokens = request.num_computed_tokens - self._num_drafts.get(request_id, 0)
        segments, compression = self._manager.segments_of(request_id), self._compressions.get(request_id)
        if request_id in self._spread:
            segments = self._spread[request_id].before
        external = 0
        if compression is not None and compression.external_bytes:
            external = self._limits.external_bytes(segments.changed_at) * self._num_workers
        num_blocks = self._manager.num_held_blocks(request_id)
        others = [one.req_to_blocks.get(request_id, ()) for one in self._managers if one is not self._manager]
        num_blocks += sum(not block.is_null for blocks in others for block in blocks)
        return CacheSize(segments.num_entries(num_tokens), num_tokens, num_blocks, external)


class SyncCompressionScheduler(CompressionSchedulerMixin, Scheduler):
    """vLLM's synchronous scheduler with compression."""


class AsyncCompressionScheduler(CompressionSchedulerMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with compression."""


def KVMergeScheduler(vllm_config: Any, **kwargs: Any) -> CompressionSchedulerMixin:  # noqa: N802
    """The engine's ``scheduler_cls``: vLLM calls it once it has decided on asynchronous scheduling."""
    compat.install()
    compat.register_cache_spec()
    compat.answer_servers()
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (AsyncCompressionScheduler if asynchronous else SyncCompressionScheduler)(vllm_config=vllm_config, **kwargs)
