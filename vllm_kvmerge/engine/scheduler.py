"""vLLM's scheduler with compression: carries out each request's ``schedule``, step by step."""

import time
from concurrent.futures import Future
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
from vllm_kvmerge.engine.admission import Admission
from vllm_kvmerge.engine.arguments import plugin_config, request_limits
from vllm_kvmerge.engine.blocks import WINDOW_SPECS, MergeableAttentionManager, compressed_group, window_blocks
from vllm_kvmerge.engine.connectors import HiddenRequests
from vllm_kvmerge.engine.contexts import CONTEXT_KEY, ContextStore
from vllm_kvmerge.engine.failures import FailedRequests, as_bad_request, cannot_be_spelled
from vllm_kvmerge.engine.fronts import FrontCache
from vllm_kvmerge.engine.hints import Hints
from vllm_kvmerge.engine.internal_requests import InternalRequest, RepeatingRequest, VerifyingRequest
from vllm_kvmerge.engine.messages import (
    NO_REPORT,
    NO_STEP,
    CompressionReport,
    CompressionStep,
    Failure,
    attach,
    attached_report,
    attached_step,
)
from vllm_kvmerge.engine.metrics import NOT_OFFLOADED, REPEATING, CacheGauges, count_generated
from vllm_kvmerge.engine.planning import Planner
from vllm_kvmerge.engine.poison import FreedBlocks
from vllm_kvmerge.engine.prefix_keys import PrefixKeys
from vllm_kvmerge.engine.pressure import Pressure
from vllm_kvmerge.engine.repetition import Repetitions
from vllm_kvmerge.engine.schedule import cdiv
from vllm_kvmerge.engine.served_model import EngineModel
from vllm_kvmerge.engine.sharing import ContextSharing
from vllm_kvmerge.engine.state import RequestState
from vllm_kvmerge.engine.support import check_config
from vllm_kvmerge.engine.usage import CacheSize
from vllm_kvmerge.engine.verification import VERIFY_KEY, Verifications, repeats
from vllm_kvmerge.policies.errors import label
from vllm_kvmerge.request.limits import KEPT_SHARE, Limits
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY, FULL

_new_tokens = attrgetter("new_token_ids")


class CompressionSchedulerMixin(Scheduler):
    """Adds compression to vLLM's scheduler; a request that is not compressed has no ``RequestState``."""

    dynamic_sd_lookup: list[int] | None
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_config(self.vllm_config)
        self._correct_steps()
        coordinator, group = self.kv_cache_manager.coordinator, compressed_group(self.kv_cache_config)
        self._managers = coordinator.single_type_managers
        manager = self._managers[group]
        assert isinstance(manager, MergeableAttentionManager)
        self._manager, self._states = manager, manager.states
        manager.windows = [one for one in self._managers if type(one.kv_cache_spec) in WINDOW_SPECS]
        for one in self._managers:
            if isinstance(one.kv_cache_spec, AttentionSpec):
                one._record_new_block_ids = True  # blocks that a compressed request wrote may go to any layers
        options, cache = plugin_config(self.vllm_config), self.kv_cache_config
        limits = self._limits(manager.block_size)
        self._engine = self.parallel_config.data_parallel_index
        # Groups of layers have the same memory: a block is one group's at a time.
        self._num_workers = self.parallel_config.tensor_parallel_size
        bytes_per_block = cache.kv_cache_tensors[0].size // cache.num_blocks * self._num_workers
        self._num_drafts: dict[str, int] = {}
        """Tokens of the step that have yet to be verified, by request."""
        self._is_small = limits.most_generated(None, 1) + 1 < self.max_model_len
        """The pool does not hold what the model can read."""
        hash_function = get_hash_fn_by_name(self.cache_config.prefix_caching_hash_algo)
        keys = PrefixKeys(hash_function, manager.block_pool.hash_block_size)
        if limits.shares_contexts:
            manager.fronts = FrontCache(manager.block_pool, group, keys, KEPT_SHARE * limits.max_bytes)
        most = self._most_of_contexts(limits, options.contexts_share)
        self._contexts = ContextStore(manager, bytes_per_block, most, hash_function)
        self._accounts = Accounts(bytes_per_block, self._size)
        self._sharing = ContextSharing(manager, self._engine, self._accounts)
        model = EngineModel(self.vllm_config.model_config, limits.is_calibrated)
        self._admission = Admission(options.default, model, limits, self.max_model_len, self._engine)
        self._failed = FailedRequests(self._engine)
        self._pressure = Pressure(
            manager,
            self.max_num_scheduled_tokens,
            self.kv_cache_manager.watermark_blocks,
            num_drafts=self.num_spec_tokens,
            is_async=isinstance(self, AsyncScheduler),
        )
        self._planner = Planner(
            manager,
            self._sharing,
            self._accounts,
            self._pressure,
            num_heads=limits.num_heads,
            bytes_per_block=bytes_per_block,
            engine=self._engine,
            fail=self._failed.add,
        )
        self._repetitions = Repetitions(
            self._states,
            keys,
            limits.max_bytes if self.kv_cache_manager.enable_caching else 0,
            queue=self._queue_internal,
            end=self._end_internal,
        )
        self._verifications = Verifications(
            manager.block_pool.hash_block_size,
            queue=self._queue_internal,
            end=self._end_internal,
            free_blocks=self._free_blocks_for,
            grammars=self.structured_output_manager,
        )
        self._hooks = [
            compat.hash_blocks_of(coordinator, manager.hashes_blocks_of),
            compat.watch_asked_blocks(coordinator, self._pressure.note_asked),
        ]
        self._shortcuts = self._to_vllm()
        self._are_hooked = True
        self._hidden = HiddenRequests(group)
        if self.connector is not None:
            compat.keep_from_connector(self.connector, lambda request: request.request_id in self._hidden)
        self._freed = FreedBlocks(manager.block_pool, manager) if options.debug_poison_freed else None
        self._gauges = CacheGauges(self._engine, bytes_per_block)

    def _correct_steps(self) -> None:
        """Corrects what vLLM has decided on the size of steps, and on drafts in them."""
        steps = self.vllm_config.scheduler_config
        if not steps.enable_chunked_prefill:
            # With drafts vLLM notes the former limit of a step before its CPU platform raises it for latents (MLA): a
            # longer prompt, which cannot be cut, would wait for ever.
            self.max_num_scheduled_tokens = max(self.max_num_scheduled_tokens, steps.max_num_batched_tokens)
        if self.num_spec_tokens and self.dynamic_sd_lookup is None:
            # A number for each size of batch, all the same, has vLLM schedule no drafts that nobody has made: such
            # padding, for CUDA graphs, could not be cut where a compression is due.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def _limits(self, block_size: int) -> Limits:
        """Those of requests, with the pool's. block_size: of the compressed layers; vLLM's own number is the smallest
        of all groups, which may be that of states."""
        num_slots = (self.kv_cache_config.num_blocks - 1) * block_size
        windows = window_blocks(self.kv_cache_config, self.vllm_config)
        limits = request_limits(self.vllm_config)
        return replace(limits, block_size=block_size, pool_tokens=num_slots, window_blocks=windows)

    def _most_of_contexts(self, limits: Limits, share: float) -> int:
        """Blocks that kept contexts may take: a share of all, and beside them there is room for the longest request,
        which would otherwise wait for ever."""
        num_blocks, length = self.kv_cache_config.num_blocks - 1, self.max_model_len
        longest = cdiv(length, limits.block_size) + cdiv(limits.window_slots(length), limits.block_size)
        return max(0, min(int(share * num_blocks), num_blocks - longest))

    # Requests, as they arrive, are preempted and end.

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            try:
                state = self._admit(request)
            except Exception as error:  # this request alone ends, before its first step
                self._failed.add(request.request_id, error)
            else:
                if state is not None:
                    self._states[request.request_id] = state
                    if self.connector is not None:
                        self._hidden.add(request.request_id)
                        NOT_OFFLOADED.labels(state.policy, self._engine).inc()
        super().add_request(request)

    def _admit(self, request: Request) -> RequestState | None:
        """What is to be known of a request that is compressed; None: it is not."""
        extra = (request.sampling_params.extra_args if request.sampling_params else None) or {}
        config = self._admission.config(request, extra.get(EXTRA_ARGS_KEY))
        free = self.kv_cache_config.num_blocks - 1 - self._contexts.num_blocks
        schedule = self._admission.schedule(request, config, free)
        if (asked := extra.get(CONTEXT_KEY)) is not None:
            self._contexts.ask(request, asked, schedule)
        if (key := extra.get(VERIFY_KEY)) is not None:
            self._verifications.note(request, key)
        self._accounts.begin(request, extra, config, schedule)
        if schedule is None:
            return None
        most_tokens, keys = self._admission.most_tokens(schedule), self._sharing.keys(request, schedule)
        return RequestState(request, schedule, most_tokens, Hints.of(request.kv_hints), keys=keys)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._accounts.note(request)
        if (state := self._states.get(request.request_id)) is not None:
            self._planner.drop(state)
            self._repetitions.stop(state)
            state.release_kept()
            state.due_since = None
            if state.awaits_pressure:
                state.reported.clear()  # it will not go through the same compressions again
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

    def _queue_internal(self, internal: InternalRequest) -> None:
        self.requests[internal.request_id] = internal
        if self.connector is not None:
            self._hidden.add(internal.request_id)
        if isinstance(internal, RepeatingRequest):
            self.waiting.prepend_request(internal)
        else:
            self.waiting.add_request(internal)

    def _free_blocks_for(self, internal: VerifyingRequest) -> tuple[int, bool]:
        """``Verifications``' ``free_blocks``."""
        known, manager = internal.num_computed_tokens, self.kv_cache_manager
        if not known and manager.enable_caching:
            known = manager.coordinator.find_longest_cache_hit(internal.block_hashes, internal.start)[1]
        num_tokens = internal.num_tokens - known
        needed = sum(cdiv(num_tokens, one.block_size) for one in self._managers)
        has_room = self._manager.offer_unhashed(needed) == needed
        if internal.may_evict:
            has_room = self._manager.block_pool.get_num_free_blocks() >= needed
        return num_tokens, has_room

    def _has_waiting(self) -> bool:
        """Whether a user's request waits for a place to run."""
        return any(not isinstance(one, InternalRequest) for one in self.waiting)

    def _end_internal(self, request_ids: list[str]) -> None:
        super().finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        finished = super().finish_requests(*args, **kwargs)
        self._repetitions.end_orphans()
        return [request for request in finished if not isinstance(request, InternalRequest)]

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._accounts.note(request)
        state = self._states.get(request.request_id)
        if repeats(request.output_token_ids):
            REPEATING.labels(self._policy(request.request_id), self._engine).inc()
        if self._contexts.is_asked(request.request_id):
            front = None if state is None else self._sharing.front_of(state)
            self._contexts.end(request, front, None if state is None else state.schedule)
        if state is not None:
            if state.work is None:
                self._contexts.hold(self._sharing.keep_turn(state), state.hints.expect)
            if state.hints.pin:
                self._contexts.hold(self._sharing.front_of(state), state.hints.pin)
            self._planner.drop(state)
            self._repetitions.stop(state)
        params, *others = super()._free_request(request, *args, **kwargs)
        self._states.pop(request.request_id, None)
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
        self._begin_step()
        output = super().schedule(*args, **kwargs)
        self._num_drafts = {one: len(drafts) for one, drafts in output.scheduled_spec_decode_tokens.items()}
        step = None if self._is_plain() else self._compress(output)
        attach(output, None if step == NO_STEP else step)
        self._set_gauges(step is not None and bool(step.compress))
        return output

    def _begin_step(self) -> None:
        self._end_failed()
        self._repetitions.end_orphans()  # of requests preempted between steps, as by a reset of the prefix cache
        self._contexts.expire()
        self._put_repetitions_first()
        # A step takes blocks for new tokens, and the last of each request that is not full.
        self._manager.evict_superseded_first(
            cdiv(self.max_num_scheduled_tokens, self._manager.block_size) + self.max_num_running_reqs
        )
        self._pressure.begin_step()
        if self._freed is not None:
            self._freed.begin_step()
        self._go_on_verifying()
        are_asked = bool(self._states) or self._verifications.is_at_work
        if are_asked != self._are_hooked:
            self._are_hooked = are_asked
            for hook in self._hooks:
                hook.switch(are_asked)
            for hook in self._shortcuts:
                hook.switch(not are_asked)

    def _is_plain(self) -> bool:
        """Whether a step that vLLM has scheduled has nothing of ours: no request is compressed or reports its cache,
        and there is nothing to tell workers. Most steps of most servers."""
        fronts = self._manager.fronts
        return not (
            self._states
            or self._verifications.is_at_work
            or self._repetitions.orphans
            or self._accounts.has_steps
            or self._manager.has_retired
            or self._sharing.has_turns
            or self._repetitions.known_scores.has_forgotten
            or (fronts is not None and fronts.has_forgotten)
            or self._freed is not None
        )

    def _compress(self, output: SchedulerOutput) -> CompressionStep:
        """What workers do besides the step that vLLM has scheduled."""
        self._repetitions.end_orphans()
        self._states.release_kept(self.running)
        self._accounts.begin_step(self.running)
        step, scheduled = CompressionStep(), output.num_scheduled_tokens
        step.adopt = self._sharing.adoptions()
        self._contexts.resume(step.adopt.values())
        self._verifications.go_on(scheduled, self._has_waiting, step)
        stuck = list[Request]()
        if self._states:  # plain requests do not pay for others
            stuck = self._repetitions.go_on(list(self.running), output, step)
            step.outputs = self._sharing.new_contexts(scheduled)
            self._planner.compress_due(self.running, scheduled, step, self._stop_running)
        step.scores.forgotten.extend(self._repetitions.known_scores.take_forgotten())
        is_idle = not scheduled and self.pause_state != PauseState.PAUSED_ALL
        if stuck and len(stuck) == len(self.running) and is_idle:
            # Deadlock: nothing runs, and what they wait for finds no room, or is behind others that find none.
            self._stop_running(stuck[-1])
        self._repetitions.end_orphans()
        if self._states:
            first_waiting = self.waiting.peek_request() if self.waiting else None
            self._planner.relieve_pressure(self.running, first_waiting, step)
        self._manager.release_retired()
        step.turns = self._sharing.take_turns()
        if self._manager.fronts is not None:
            step.drop = self._manager.fronts.take_forgotten()
        compressed = {one.request_id: one.is_refresh for one in step.compress}
        step.usage = self._accounts.end_step(self.running, compressed)
        if self._freed is not None:
            step.poison = self._freed.take()
        return step

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())

    def _set_gauges(self, has_compressed: bool) -> None:
        if not self.log_stats or not self._gauges.are_due(len(self.running), has_compressed):
            return
        users = [one for one in self.running if not isinstance(one, InternalRequest)]
        self._gauges.update([(self._policy(one.request_id), self._size(one)) for one in users])
        self._set_context_gauges()

    def _set_context_gauges(self) -> None:
        if self.log_stats and self._manager.fronts is not None:
            fronts, contexts = self._manager.fronts, self._contexts
            self._gauges.update_contexts(len(fronts), fronts.num_blocks, len(contexts), contexts.num_blocks)

    def call_contexts(self, text: str) -> str:
        """``ContextStore.call``."""
        answer = self._contexts.call(text)
        self._set_context_gauges()
        self._go_on_verifying()
        return answer

    def verify(self, text: str) -> Future[str]:
        """``Verifications.ask``."""
        result = self._verifications.ask(text)
        self._go_on_verifying()
        return result

    def _go_on_verifying(self) -> None:
        self._verifications.begin_step(self._has_waiting, len(self.running) < self.max_num_running_reqs)

    def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        # Even if blocks are in use: the model's weights may be about to change.
        self._repetitions.known_scores.clear()
        if not self.running or reset_running_requests:
            self._contexts.clear()
        if reset_running_requests:
            for state in self._states.values():
                self._planner.drop(state)
            self._sharing.clear()
        return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            for internal in (*self._repetitions.running(), *self._verifications.running()):
                if internal.status == RequestStatus.RUNNING:
                    stats.num_running_reqs -= 1
                else:
                    stats.num_waiting_reqs -= 1
        return stats

    def _put_repetitions_first(self) -> None:
        """Puts waiting internal requests before users', which may have been preempted since and may need their room."""
        repetitions = [one for one in self._repetitions.running() if one.status != RequestStatus.RUNNING]
        if repetitions:
            self.waiting.remove_requests(repetitions)
            self.waiting.prepend_requests(repetitions)

    def _get_local_prefix_cache_hit(
        self, request: Request, *longest_hit: int | None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        if isinstance(request, RepeatingRequest):
            parent, num_shared = request.parent.request_id, request.context // self.block_size * self.block_size
            shared = tuple(one.req_to_blocks[parent][: num_shared // one.block_size] for one in self._managers)
            return self.kv_cache_manager.create_kv_cache_blocks(shared), num_shared, 0, False
        state = self._states.get(request.request_id)
        if state is None:
            return super()._get_local_prefix_cache_hit(request, *longest_hit)
        state.offer = None
        # vLLM bounds hits if it returns the experts of all tokens: of those in a front, they are not known.
        is_bounded = any(bound is not None for bound in longest_hit)
        if not is_bounded and (front := self._sharing.first_front(state)) is not None:
            # The last token of all is computed in any case: what comes after it is not part of a front.
            num_hit_tokens = min(front.num_tokens, request.num_tokens - 1)
            writes = state.schedule.config.tracks(is_partial=state.schedule.is_in_context(front.segments))
            rows = self._manager.offer(state, front, writes, num_hit_tokens)
            # With nothing else running, a front that does not fit would be waited for for ever.
            needed = self._manager.num_to_begin(state, rows)
            if self.running or needed <= self._manager.block_pool.get_num_free_blocks():
                return self.kv_cache_manager.create_kv_cache_blocks(rows), num_hit_tokens, 0, False
            state.offer = None
        blocks, num_hit_tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request, *longest_hit)
        if (due_at := state.due_at) is not None:
            longest = state.schedule.longest_prefix(due_at)
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
        state = self._states.get(request.request_id)
        if num_new_tokens > 1:
            num_certain = request.num_tokens + request.num_output_placeholders - num_computed_tokens
            if num_new_tokens > num_certain:
                num_new_tokens = max(num_certain, min(num_new_tokens, self._draft_end(request) - num_computed_tokens))
        if state is None:
            return num_new_tokens
        if state.work is not None:
            return 0
        due_at = state.due_at
        if due_at is None and not state.awaits_pressure:
            return num_new_tokens
        if not self._leaves_room_to_repeat(state) or not self._states.reserve(state, self._admission.limits):
            return 0
        if due_at is None:
            most = self._admission.limits.pool_tokens or self.max_model_len
            return self._pressure.fitting(request, num_computed_tokens, num_new_tokens, most)
        # A request whose compression is due but found no room computes nothing until it has been compressed.
        num_new_tokens = min(num_new_tokens, max(0, due_at - num_computed_tokens))
        last_block, end = due_at // self.block_size * self.block_size, num_computed_tokens + num_new_tokens
        if state.schedule.repeats_context and num_computed_tokens < last_block < end < due_at:
            # Internal requests begin at this block: windows must not have moved on before the context's end.
            return last_block - num_computed_tokens
        return num_new_tokens

    def _draft_end(self, request: Request) -> int:
        """Number of tokens that a step may come to if some of them are drafts."""
        if (state := self._states.get(request.request_id)) is not None:
            return state.draft_end()
        # vLLM lets drafts go on behind the last token that is asked for, where a small pool has no room.
        return request.num_prompt_tokens + request.max_tokens - 1 if self._is_small else self.max_model_len

    def _leaves_room_to_repeat(self, state: RequestState) -> bool:
        """False if a request must wait so that those whose contexts are repeated do not take all places to run."""
        if not state.awaits_repetition or state.request.status == RequestStatus.RUNNING:
            return True
        states = (self._states.get(request.request_id) for request in self.running)
        return sum(one is not None and one.awaits_repetition for one in states) < self.max_num_active_reqs - 1

    def _get_new_block_ids_to_zero(self) -> list[int] | None:
        new = self.kv_cache_manager.take_new_block_ids()
        unclean = self._manager.take_unclean(new)
        # Where vLLM zeroes all, any of them may hold a state of other layers.
        return (new if self.needs_kv_cache_zeroing else unclean) or None

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
        for front in step.fronts:
            self._sharing.share(front, report)
        # Before vLLM processes the step's tokens: those of failed requests must not reach their clients.
        self._end_failed()
        if step.usage:
            self._accounts.computed(step.usage)
        self._num_drafts = {}  # vLLM takes back those that were rejected
        policies = {request_id: state.policy for request_id, state in self._states.items()}  # some end now
        outputs_by_client = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
        self._count_generated(outputs_by_client, policies)
        self._repetitions.end_orphans()
        self._failed.tell(outputs_by_client)
        self._accounts.add_to(outputs_by_client)
        self._go_on_verifying()  # an idle engine makes no further step
        return outputs_by_client

    def _learn(self, report: CompressionReport) -> None:
        self._planner.learn(report)
        self._verifications.learn(report.verified)
        self._accounts.count(report)
        self._failed.update(report.failures)
        for failure in report.failures.values():
            if failure.is_last and failure.part is not None:
                self._admission.refused[failure.part] = failure.message
                self._end_users(failure.part, failure)

    def _end_users(self, part: str, failure: Failure) -> None:
        """Ends requests that are still to be compressed by a part that is not used again."""
        for request_id, state in self._states.items():
            is_needed = state.awaits_pressure or state.due_at is not None
            if is_needed and part in map(label, state.schedule.config.policy.parts):
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
        state = self._states.get(request_id)
        return FULL if state is None else state.policy

    def _size(self, request: Request) -> CacheSize:
        request_id = request.request_id
        num_tokens = request.num_computed_tokens - self._num_drafts.get(request_id, 0)
        num_entries, external, num_front_blocks, coding = num_tokens, 0, 0, None
        if (state := self._states.get(request_id)) is not None:
            segments = state.segments if state.work is None else state.work.before
            num_entries, coding = segments.num_entries(num_tokens), state.schedule.coding
            num_front_blocks = self._manager.num_blocks_before(request_id, segments.tail)
            if state.schedule.external_bytes:
                external = self._admission.limits.external_bytes(segments.changed_at) * self._num_workers
        num_blocks = self._manager.num_held_blocks(request_id)
        others = [one.req_to_blocks.get(request_id, ()) for one in self._managers if one is not self._manager]
        num_blocks += sum(not block.is_null for blocks in others for block in blocks)
        return CacheSize(num_entries, num_tokens, num_blocks, external, num_front_blocks, coding)


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
