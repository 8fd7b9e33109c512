"""The scheduler's side of compression: decides when a request's cache is compressed, and into which blocks."""

import time
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_kvmerge.engine.arguments import plugin_config, request_limits
from vllm_kvmerge.engine.blocks import MergeableAttentionManager, Segments, register_spec
from vllm_kvmerge.engine.metrics import CacheGauges, count_compression, count_failure, count_generated, count_request
from vllm_kvmerge.engine.plan import CompressionPlan, CompressionReport, CompressionStep, Failure, PromptWindow
from vllm_kvmerge.engine.processes import end_with_parent
from vllm_kvmerge.engine.support import UnsupportedConfigError, check_config
from vllm_kvmerge.engine.usage import ERROR_KEY, REPORT_KEY, STREAM, USAGE_KEY, CacheUsage
from vllm_kvmerge.policies.errors import PartError, describe
from vllm_kvmerge.request.limits import Compression, Limits
from vllm_kvmerge.request.parameters import EXTRA_ARGS_KEY, FULL, CompressionConfig, CompressionError, parse_compression

register_spec()


logger = init_logger(__name__)

NEVER_COMPRESSED = Segments(front=0, tail=0)

KEPT_SHARE = 4
"""How many times ``max_compaction_bytes`` workers keep outside the pool, of all running requests together."""

STEP_SECONDS = 0.25
"""How long the compressions of one step may keep everybody else waiting, unless a single one takes longer."""


@dataclass(frozen=True)
class RequestCompression:
    """A request's policy, kept on the request as ``kv_compression``.

    context: tokens of its prompt that are compressed first, before the others are computed; all of them as a rule.
    budget: live entries per KV head, on average. capacity: entries per KV head that its front may hold; None: all.
    interval: live entries above those that trigger a compression. window_start, query_window: which queries its first
    compression needs: those from a position of the context on (None: none), and so many of the newest. ring_bytes,
    score_bytes: what its worker keeps outside the pool, of the newest queries and, up to the first compression, of the
    context's scores.

    Whatever a part is asked for has been asked when this is made, so that nothing of it raises in a step.
    """

    config: CompressionConfig
    context: int
    budget: int
    capacity: int | None
    interval: int
    window_start: int | None
    query_window: int
    ring_bytes: int
    score_bytes: int

    @classmethod
    def of(
        cls, config: CompressionConfig, num_prompt_tokens: int, max_tokens: int, limits: Limits
    ) -> "RequestCompression":
        context = config.resolve_context(num_prompt_tokens)
        budget, window = config.resolve_budget(context), config.prompt_window
        query_window = min(config.policy.query_window, num_prompt_tokens + max_tokens)
        start = 0 if window == "all" else max(0, context - window)
        return cls(
            config,
            context,
            budget,
            config.resolve_capacity(context),
            config.interval or limits.block_size,
            start if window else None,
            query_window,
            limits.ring_bytes(query_window, num_prompt_tokens + max_tokens),
            limits.prompt_score_bytes(context) if window else 0,
        )

    def full_front(self, num_entries: int) -> int:
        """Entries per KV head that the front holds after a compression of ``num_entries``."""
        return num_entries if self.capacity is None else min(num_entries, self.capacity)


class CompressionSchedulerMixin(Scheduler):
    """Adds compression to vLLM's scheduler.

    Decisions depend on counts alone, never on data, so that they hold for every tensor-parallel worker and under
    asynchronous scheduling.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_config(self.vllm_config)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1 or not isinstance(managers[0], MergeableAttentionManager):
            raise UnsupportedConfigError(
                "model layers: all must be full attention with one KV head count and size, "
                f"got {[type(manager.kv_cache_spec).__name__ for manager in managers]}"
            )
        self._manager = managers[0]
        self._default = plugin_config(self.vllm_config).default
        self._limits = request_limits(self.vllm_config)
        self._failures: dict[str, Failure] = {}
        self._ended: list[tuple[Request, Failure]] = []
        self._due: dict[str, None] = {}
        self._kept_bytes: dict[str, int] = {}
        bytes_per_block = sum(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors) // (
            self.kv_cache_config.num_blocks
        )
        self._bytes_per_block = bytes_per_block * self.parallel_config.tensor_parallel_size
        self._engine = self.parallel_config.data_parallel_index
        self._gauges = CacheGauges(self._engine, self._bytes_per_block)
        self._usages: dict[str, CacheUsage] = {}

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            request.kv_compression = self._resolve_or_fail(request)  # type: ignore[attr-defined]
            if asked := _extra_args(request).get(USAGE_KEY):
                self._usages[request.request_id] = CacheUsage(self._bytes_per_block, streams=asked == STREAM)
        super().add_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._kept_bytes.pop(request.request_id, None)
        params, *others = super()._free_request(request, *args, **kwargs)
        if usage := self._usages.pop(request.request_id, None):
            params = {**(params or {}), REPORT_KEY: usage.report()}
        return params, *others

    def _resolve_or_fail(self, request: Request) -> RequestCompression | None:
        """``_resolve``; a request that cannot be honoured ends with its first step, and nobody else."""
        try:
            return self._resolve(request)
        except PartError as error:
            self._failures[request.request_id] = Failure(str(error), error.part)
        except CompressionError as error:
            self._failures[request.request_id] = Failure(str(error))
        except Exception as error:
            logger.exception("Compression of request %s cannot be resolved", request.request_id)
            self._failures[request.request_id] = Failure(describe(error), "unknown")
        return None

    def _end_failed(self) -> None:
        """Ends the requests that have failed; their clients are told with the next outputs."""
        for request in self.finish_requests(self._failures, RequestStatus.FINISHED_ERROR):
            failure = self._failures[request.request_id]
            if failure.part is not None:
                count_failure(_policy_name(request), failure.part, self._engine)
            self._ended.append((request, failure))
        self._failures = {}

    def _tell_ended(self, outputs_by_client: dict[int, EngineCoreOutputs]) -> None:
        for request, failure in self._ended:
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                kv_transfer_params={REPORT_KEY: {ERROR_KEY: failure.message}},
                trace_headers=request.trace_headers,
            )
            outputs_by_client.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        self._ended = []

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput, *args: Any, **kwargs: Any
    ) -> dict[int, EngineCoreOutputs]:
        report: CompressionReport | None = getattr(model_runner_output, "kvmerge", None)
        if report is not None:
            self._failures |= report.failures
            if report.rates is not None:
                self._limits = replace(self._limits, rates=report.rates)
        # Before vLLM looks at what the step generated: of those that failed it is not what was asked for.
        if self._failures:
            self._end_failed()
        for request_id, step in getattr(scheduler_output, "kvmerge_steps", {}).items():
            if usage := self._usages.get(request_id):
                usage.end_step(step)
        outputs_by_client = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
        if self._ended:
            self._tell_ended(outputs_by_client)
        if self._usages:
            for output in chain.from_iterable(outputs.outputs for outputs in outputs_by_client.values()):
                usage = self._usages.get(output.request_id)
                if usage is not None and usage.streams:
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), REPORT_KEY: usage.steps_report()}
        return outputs_by_client

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        kept_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        count_generated(_policy_name(request), self._engine, len(kept_token_ids))
        return kept_token_ids, stopped

    def _resolve(self, request: Request) -> RequestCompression | None:
        asked = _extra_args(request).get(EXTRA_ARGS_KEY)
        config = parse_compression(self._default if asked is None else asked)
        if request.resumable:
            # Its prompt grows by turns, of which limits know nothing, and vLLM takes tokens back between them.
            if asked is not None and config is not None:
                raise CompressionError(EXTRA_ARGS_KEY, "streamed prompts are not compressed; allowed: full", "streamed")
            config = None
        count_request(config.name if config else FULL, self._engine)
        if config is None:
            return None
        # A server's front end has refused what the limits and the prompt do not allow; offline there is none.
        config.check_context(request.num_prompt_tokens)
        self._limits.check(config, request.num_prompt_tokens, request.max_tokens)
        if config.never_compresses(request.num_prompt_tokens, request.max_tokens):
            return None  # plain attention is exact and cheaper
        return RequestCompression.of(config, request.num_prompt_tokens, request.max_tokens, self._limits)

    def _next_compression(self, request: Request, state: RequestCompression) -> int | None:
        """The number of computed tokens at which the request is to be compressed next; None: never."""
        bounded = state.config.decode == "bounded"
        # Where some layers keep everything, the others count.
        limit = (state.budget if state.capacity is None else state.capacity) + state.interval
        segments = self._manager.segments.get(request.request_id)
        if segments is not None:
            front = segments.front if state.capacity is not None else min(segments.front, state.budget)
            limit += segments.tail - front
        elif state.context > state.budget or state.config.tracks_decode:
            # Attention writes scores into the blocks it reads, so a policy that tracks them moves to blocks of its own
            # at the end of the context even if nothing has to go yet.
            return state.context
        # What follows the context stays whole until the prompt has been computed.
        return max(limit, request.num_prompt_tokens) if bounded else None

    @staticmethod
    def _window_start(state: RequestCompression, compression: int) -> int | None:
        """Position of the first query that the policy needs for a first compression at ``compression`` tokens."""
        starts = [] if state.window_start is None else [state.window_start]
        if state.query_window:
            starts.append(max(0, compression - state.query_window))
        return min(starts, default=None)

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        blocks, num_hit_tokens, boundary, diverged = super()._get_local_prefix_cache_hit(request)
        state = request.kv_compression  # type: ignore[attr-defined]
        compression = self._next_compression(request, state) if state is not None else None
        if compression is not None:
            limit = compression - 1  # a compression follows a step that computes something
            start = self._window_start(state, compression)
            if start is not None:  # a cached token's query is gone
                limit = min(limit, start)
            allowed = limit // self.block_size * self.block_size
            if num_hit_tokens > allowed:
                blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, allowed)
                num_hit_tokens = allowed
        return blocks, num_hit_tokens, boundary, diverged

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        # vLLM asks here where a chunk may end. A context is compressed before the rest of the prompt is computed. A
        # preempted request computes its prompt and the tokens that it had generated again: chunks end where it was
        # compressed the first time, so that its cache comes out the same.
        num_new_tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        state = request.kv_compression  # type: ignore[attr-defined]
        compression = self._next_compression(request, state) if state is not None else None
        if compression is None:
            return num_new_tokens
        if not self._keeps_room_for(request, state):
            return 0
        # A request whose compression is due but found no room computes nothing until it has been compressed.
        return min(num_new_tokens, max(0, compression - num_computed_tokens))

    def _keeps_room_for(self, request: Request, state: RequestCompression) -> bool:
        """Whether workers have room outside the pool for what they keep of the request; it has that until it ends.

        A request alone always has. Others wait, as they do for blocks.
        """
        needed = state.ring_bytes + state.score_bytes
        if needed and request.request_id not in self._kept_bytes:
            if self._kept_bytes and sum(self._kept_bytes.values()) + needed > KEPT_SHARE * self._limits.max_bytes:
                return False
            self._kept_bytes[request.request_id] = needed
        return True

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._kept_bytes.pop(request.request_id, None)
        super()._preempt_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._failures:
            self._end_failed()
        output = super().schedule(*args, **kwargs)
        self._note_peaks()
        step = CompressionStep()
        waiting = self._plan_due(step)
        while waiting and not output.num_scheduled_tokens and not step.plans:
            # Nothing moves any more: requests that share their blocks wait for room to copy them. One has to go.
            self.running.remove(waiting[-1])
            self._preempt_request(waiting[-1], time.monotonic())
            waiting = self._plan_due(step)
        self._manager.release_retired()
        output.kvmerge = step  # type: ignore[attr-defined]
        self._count_step(output)
        if self.log_stats:
            self._gauges.update([self._live_size(request) for request in self.running])
        return output

    def _plan_due(self, step: CompressionStep) -> list[Request]:
        """Adds to ``step`` the compressions due after it; returns the requests that found no room for theirs.

        Those of one step take no longer together than ``STEP_SECONDS``, or than one of them alone, as far as can be
        told beforehand. The others are put off to the next steps, whoever has waited longest first; until then their
        requests compute nothing.
        """
        due: dict[str, Request] = {}
        for request in self.running:
            state = request.kv_compression  # type: ignore[attr-defined]
            compression = self._next_compression(request, state) if state is not None else None
            if compression is None:
                continue
            if request.request_id not in self._manager.segments:
                start = self._window_start(state, compression)
                if start is not None:
                    step.windows[request.request_id] = PromptWindow(start, state.config.text, state.query_window)
            if request.num_computed_tokens >= compression:
                due[request.request_id] = request
        waiting, seconds = [], 0.0
        self._due = dict.fromkeys([*(name for name in self._due if name in due), *due])
        for request_id in list(self._due):
            request = due[request_id]
            try:
                estimate = self._seconds(request)
            except PartError as error:
                self._failures[request_id] = Failure(str(error), error.part)
                del self._due[request_id]
                continue
            if step.plans and seconds + estimate > STEP_SECONDS:
                break
            if self._plan(request, request.kv_compression, step):  # type: ignore[attr-defined]
                seconds += estimate
                del self._due[request_id]
            else:
                waiting.append(request)
        return waiting

    def _seconds(self, request: Request) -> float:
        """Estimate for the compression that is due."""
        state = request.kv_compression  # type: ignore[attr-defined]
        segments = self._manager.segments.get(request.request_id, NEVER_COMPRESSED)
        num_entries = segments.front + request.num_computed_tokens - segments.tail
        one = Compression(num_entries, state.budget, segments == NEVER_COMPRESSED)
        return self._limits.seconds(state.config, one)

    def _plan(self, request: Request, state: RequestCompression, step: CompressionStep) -> bool:
        """Adds the request's compression to ``step``; False if there is no room to copy blocks that others share."""
        num_tokens = request.num_computed_tokens
        segments = self._manager.segments.get(request.request_id, NEVER_COMPRESSED)
        new_front = state.full_front(segments.front + num_tokens - segments.tail)
        relocation = self._manager.relocate(request.request_id, num_tokens, new_front)
        if relocation is None:
            return False
        step.plans.append(
            CompressionPlan(
                request.request_id,
                state.config.text,
                segments.front,
                segments.tail,
                num_tokens,
                state.budget,
                new_front,
                relocation.blocks,
            )
        )
        if request.request_id in self._kept_bytes:  # the context's scores have been used up
            self._kept_bytes[request.request_id] = state.ring_bytes
        num_freed = relocation.num_freed
        count_compression(state.config.name, self._engine, num_freed, num_freed * self._bytes_per_block)
        return True

    def _get_new_block_ids_to_zero(self) -> list[int] | None:
        return self.kv_cache_manager.take_new_block_ids() or None

    def _live_size(self, request: Request) -> tuple[str, int, int, int]:
        """(policy, live entries per KV head, represented tokens, blocks held) of a running request."""
        segments = self._manager.segments.get(request.request_id)
        hidden = segments.tail - segments.front if segments else 0
        num_tokens = request.num_computed_tokens
        return _policy_name(request), num_tokens - hidden, num_tokens, self._manager.num_held_blocks(request.request_id)

    def _reporting(self) -> list[tuple[Request, CacheUsage]]:
        """The running requests that asked for a report of what they hold."""
        if not self._usages:
            return []
        return [(request, usage) for request in self.running if (usage := self._usages.get(request.request_id))]

    def _note_peaks(self) -> None:
        for request, usage in self._reporting():
            _, entries, _, blocks = self._live_size(request)
            usage.note_peak(entries, blocks)

    def _count_step(self, output: SchedulerOutput) -> None:
        steps = {}
        for request, usage in self._reporting():
            _, entries, tokens, blocks = self._live_size(request)
            if tokens >= request.num_prompt_tokens:
                usage.count_step(entries, blocks)
            if usage.streams:
                plans = output.kvmerge.plans  # type: ignore[attr-defined]
                compressed = any(plan.request_id == request.request_id for plan in plans)
                if step := usage.begin_step(tokens, entries, blocks, compressed):
                    steps[request.request_id] = step
        if steps:
            # Under asynchronous scheduling others are scheduled before this output has been computed.
            output.kvmerge_steps = steps  # type: ignore[attr-defined]


def _policy_name(request: Request) -> str:
    state = request.kv_compression  # type: ignore[attr-defined]
    return state.config.name if state else FULL


def _extra_args(request: Request) -> dict[str, Any]:
    return (request.sampling_params.extra_args if request.sampling_params else None) or {}


class SyncCompressionScheduler(CompressionSchedulerMixin, Scheduler):
    """For vLLM without asynchronous scheduling."""


class AsyncCompressionScheduler(CompressionSchedulerMixin, AsyncScheduler):
    """For vLLM with asynchronous scheduling."""


def KVMergeScheduler(vllm_config: Any, **kwargs: Any) -> CompressionSchedulerMixin:  # noqa: N802
    """What ``scheduler_cls`` names: vLLM calls it as a class, once it is settled whether scheduling is asynchronous."""
    end_with_parent()
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (AsyncCompressionScheduler if asynchronous else SyncCompressionScheduler)(vllm_config=vllm_config, **kwargs)
