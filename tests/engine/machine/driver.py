"""What vLLM's engine core does with a scheduler and a worker, one operation at a time."""

import json
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.engine.machine.audit import Audit
from tests.engine.machine.setting import Setting, block_hasher
from tests.engine.machine.worker import Asked, Worker
from vllm_kvmerge.engine.contexts import CONTEXT_KEY
from vllm_kvmerge.engine.known_scores import KnownScores
from vllm_kvmerge.engine.messages import Kind, attached_step
from vllm_kvmerge.engine.spreading import Pace
from vllm_kvmerge.engine.usage import USAGE_KEY
from vllm_kvmerge.engine.verification import VERIFY_KEY
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY

LEAST_STEPS, STEPS_PER_TOKEN = 300, 10
"""Bound on the steps in which all requests end, once nothing is in their way: preempted ones are computed again."""


class TruePace(Pace):
    """The worker's: requests are too different for compressions of a kind to come often."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(1, clock=lambda: worker.now)
        self._worker = worker

    def is_known(self, kind: Kind) -> bool:
        return True

    def seconds(self, kind: Kind, num_entries: int) -> float:
        return num_entries * self._worker.seconds_per_entry


class Driver:
    """operations: what has been done so far: steps of the scheduler, and what comes between them."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.scheduler = setting.scheduler()
        limits = self.scheduler._admission.limits
        if setting.external_tokens is not None:
            max_bytes = limits.external_bytes(setting.external_tokens)
            self.scheduler._admission.limits = replace(limits, max_external_bytes=max_bytes)
        if setting.has_prefix_cache:  # some contexts' scores at a time
            self.scheduler._repetitions.known_scores = KnownScores(limits.prompt_score_bytes(70))
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.events = Counter[str]()
        num_groups = len(self.scheduler.kv_cache_config.kv_cache_groups)
        self.worker = Worker(setting.num_blocks, num_groups, setting.head_pages, self._holders, self.events)
        self.scheduler._planner._pace = TruePace(self.worker)
        self.audit = Audit(self.scheduler, self.worker)
        self.texts: list[tuple[list[int], dict[str, Any] | None, str | None]] = []
        """Tokens of requests that have ended, what they asked for, and their salts."""
        self.answers: list[tuple[str, list[int]]] = []
        """Of these, names and what they generated."""
        self.verified: list[tuple[Future[str], int]] = []
        """Results of verifications, and numbers of tokens."""
        self.contexts: list[str] = []
        """Ids that contexts were to be kept under."""
        self.operations = 0
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._num_requests = 0
        self._fields: dict[str, dict[str, Any] | None] = {}

    def _holders(self, block: int) -> tuple[int, int, bool]:
        fronts, shared = self.scheduler._manager.fronts, self.pool.blocks[block]
        if fronts is None:
            return shared.ref_cnt, 0, False
        held = [one for one in self.scheduler._sharing._unshared.values() if one is not None]
        held += [fronts._fronts[key] for key in fronts._pinned.elements()]
        num_fronts = sum(shared in window.blocks for one in held for window in one.windows)
        return shared.ref_cnt, num_fronts, block in fronts._of_block

    @property
    def names(self) -> list[str]:
        """Users' requests that have not ended."""
        return [name for name in self.scheduler.requests if "/" not in name]

    # Requests.

    def add(self, prompt, max_tokens, fields, salt=None, priority=0, keeps_context=False, stops=False) -> str:
        name = f"r{self._num_requests}"
        self._num_requests += 1
        extra = {} if fields is None else {EXTRA_ARGS_KEY: json.dumps(fields)}
        if keeps_context:
            self.contexts.append(f"c{self._num_requests}")
            extra[CONTEXT_KEY] = json.dumps({"id": self.contexts[-1]})
        if self._num_requests % 3 == 0:
            extra[USAGE_KEY] = "request"
        if self._num_requests % 2:
            extra[VERIFY_KEY] = name
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[3] if stops else None, extra_args=extra or None
        )
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(self._num_requests),
            cache_salt=salt,
            priority=priority,
            block_hasher=block_hasher,
        )
        self.worker.asked[name], self._fields[name] = Asked(salt), fields
        self.scheduler.add_request(request)
        state = self.scheduler._states.get(name)
        if state is not None:
            config = state.schedule.config
            tracker = config.policy.tracker
            asked = Asked(
                salt, config.front_policy, state.schedule.context, f"{tracker.name} {tracker.model_dump_json()}"
            )
            self.worker.asked[name] = asked
            self.events[f"policy {config.name}"] += 1
        self._did("requests")
        return name

    def verify(self, which: int) -> None:
        name, answer = self.answers.pop(which % len(self.answers))
        asked = {"key": name, "answer": answer, "seconds": 3600.0, "max_tokens": 1000}
        asked |= {"may_evict": which % 2 == 0, "is_last": True}
        self.verified.append((self.scheduler.verify(json.dumps(asked)), len(answer)))
        self._did("verifications")

    def abort(self, names: list[str]) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        self._did("aborts")

    def preempt(self, name: str) -> None:
        """As the scheduler does when it finds no block."""
        request = self.scheduler.requests.get(name)
        if request is not None and request.status == RequestStatus.RUNNING:
            self.scheduler.running.remove(request)
            self.scheduler._preempt_request(request, time.monotonic())
            # It may be resumed at once, as after a reset of the running ones.
            self.scheduler.prev_step_scheduled_req_ids.discard(name)
            self._did("preemptions by hand")

    # Steps.

    def step(self, aborted: str | None = None) -> bool:
        """As ``EngineCore.step``, or with asynchronous scheduling ``step_with_batch_queue``. aborted: a request that is
        aborted while the model runs. False if there was nothing to do."""
        depth = 2 if self.setting.is_async else 1
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._note(output)
            self._queue.append((output, self.worker.execute(output)))
            self._did("steps")
            if len(self._queue) < depth and (output.total_num_scheduled_tokens or self.scheduler.has_requests()):
                return True
        elif not self._queue:
            return False
        output, result = self._queue.popleft()
        if aborted is not None:
            self.abort([aborted])
        self.worker.in_flight -= {front.key for front in attached_step(output).fronts}
        ending = dict(self.scheduler.requests)
        self.scheduler.update_from_output(output, result)
        for name, request in ending.items():
            if name not in self.scheduler.requests and "/" not in name:
                text = list(request.all_token_ids), self._fields[name], request.cache_salt
                self.texts = [*self.texts[-5:], text]
                if request.num_output_tokens and VERIFY_KEY in (request.sampling_params.extra_args or {}):
                    self.answers = [*self.answers[-5:], (name, list(request.output_token_ids))]
        self.audit.run()
        return True

    def _note(self, output: SchedulerOutput) -> None:
        step = attached_step(output)
        self.events["preemptions"] += len(output.preempted_req_ids or ())
        self.events["steps with several compressions"] += len(step.compress) > 1
        self.events["blocks zeroed"] += len(output.new_block_ids_to_zero or ())
        self.events["fronts forgotten"] += len(step.drop)

    def _did(self, what: str) -> None:
        self.operations += 1
        self.events[what] += 1
        self.audit.run()

    def run_to_end(self) -> None:
        """Until nothing is left to do; fails if that takes too long."""
        requests = self.scheduler.requests.values()
        num_tokens = sum(one.num_prompt_tokens + one.max_tokens for one in requests)
        most = LEAST_STEPS + STEPS_PER_TOKEN * num_tokens
        for _ in range(most):
            if not self._queue and not self.scheduler.has_requests():
                return
            self.step()
        left = {one.request_id: (one.status.name, one.num_computed_tokens, one.num_tokens) for one in requests}
        raise AssertionError(f"requests do not end within {most} steps: {left}")

    # The pool and the caches.

    def pin(self, num_left: int) -> None:
        """Takes all free blocks but so many."""
        free = self.pool.get_num_free_blocks()
        if free > num_left:
            self.audit.taken += self.pool.get_new_blocks(free - num_left)
            self._did("pins")

    def unpin(self) -> None:
        self.pool.free_blocks(self.audit.taken)
        self.audit.taken = []
        self.scheduler._go_on_verifying()  # as after every step
        self._did("unpins")

    def reset(self, reset_running: bool) -> None:
        """Resets the prefix cache; if that succeeds, the model's weights may change."""
        if reset_running and self.audit.taken:
            return  # vLLM takes it for a failure if blocks are in use
        if self.scheduler.reset_prefix_cache(reset_running):
            self._change_weights()
            self.events["resets that succeed"] += 1
        self._did("resets")

    def _change_weights(self) -> None:
        self.worker.epoch += 1
        self.audit.forget_hashes()

    def sleep(self, mode: str, level: int) -> None:
        """As ``EngineCoreProc.sleep``, until the pause is complete. mode: of ``pause_scheduler``."""
        if mode == "abort":
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        self.scheduler.set_pause_state(state)
        if mode == "wait" and self.audit.taken:
            self.unpin()
        self.run_to_end()
        if level >= 1:
            if self.audit.taken:
                self.unpin()
            assert self.scheduler.reset_prefix_cache(reset_running_requests=True), "caches cannot be reset for a sleep"
            self._change_weights()
            self.worker.lose_memory()
        self._did(f"sleeps that {mode}")

    @property
    def is_asleep(self) -> bool:
        return self.scheduler.pause_state != PauseState.UNPAUSED

    def wake(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._did("wakes")

    def delete_context(self, salt: str | None) -> None:
        if self.contexts:
            self.contexts.append(self.contexts.pop(0))
            call = {"call": "delete", "id": self.contexts[-1], "salt": salt}
            if json.loads(self.scheduler.call_contexts(json.dumps(call))) is not None:
                self.events["kept contexts deleted"] += 1
            self._did("deletions")

    def finish(self) -> None:
        """Ends everything, and checks that nothing is left."""
        self.worker.to_fail = 0
        if self.audit.taken:
            self.unpin()
        if self.is_asleep:
            self.wake()
        self.run_to_end()
        for context in self.contexts:
            for salt in (None, "other"):
                self.scheduler.call_contexts(json.dumps({"call": "delete", "id": context, "salt": salt}))
        if not all(future.done() for future, _ in self.verified):  # all free blocks are in the prefix cache
            assert self.scheduler.reset_prefix_cache()
            self._change_weights()
            self.scheduler._go_on_verifying()
            self.run_to_end()
            for one in self.scheduler._verifications._held:  # too long for the pool
                one.until = 0.0
            self.scheduler._go_on_verifying()
        for future, count in self.verified:
            result = json.loads(future.result(0))
            if result.get("skipped") != "no_room":
                assert result["agrees"] == [True] * count, "not all tokens of an answer are verified"
                self.events["answers verified"] += 1
        # The worker hears in a step of what has gone.
        self.worker.execute(self.scheduler.schedule())
        self.audit.run_at_end()
