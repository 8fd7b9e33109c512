"""Compressions of requests that generate follow the step's answer, while the engine goes on."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.executor.multiproc_executor import WorkerProc

from tests.engine.conftest import Engine, random_prompt
from vllm_kvmerge import compression
from vllm_kvmerge.engine import compat
from vllm_kvmerge.engine.plan import CompressionPlan
from vllm_kvmerge.engine.worker.afterwards import afterwards

pytestmark = pytest.mark.engine


@pytest.fixture
def process(monkeypatch):
    """vLLM's part of a worker's process, without the process, and what it has done."""
    monkeypatch.setattr(WorkerProc, "_execute_worker_rpc", WorkerProc._execute_worker_rpc)
    compat.leave_work_in_answers()
    process, process.done, process.rank, process.use_async_scheduling = WorkerProc.__new__(WorkerProc), [], 0, False
    process.worker_response_mq = SimpleNamespace(enqueue=lambda answer: process.done.append(answer[1]))

    def compute() -> str:
        afterwards(lambda: process.done.append("compressed"))
        process.done.append("computed")
        return "answer"

    def fail() -> None:
        afterwards(lambda: process.done.append("compressed"))
        raise ValueError("it failed")

    process.worker = SimpleNamespace(compute=compute, fail=fail)
    return process


def test_work_is_done_once_the_answer_is_on_its_way(process):
    process._execute_worker_rpc(("compute", (), {}, None))
    assert process.done == ["computed", "answer", "compressed"]
    process._execute_worker_rpc(("fail", (), {}, None))
    assert process.done[3:] == ["it failed", "compressed"]


def test_work_is_done_at_once_outside_of_such_a_process():
    done = []
    afterwards(lambda: done.append("compressed"))
    assert done == ["compressed"]


def test_only_what_nobody_waits_for_may_report_late(engine: Engine, monkeypatch) -> None:
    plans: list[CompressionPlan] = []
    run_plans = engine.compression.run_plans

    def watched(blocks_of):
        of_step = engine.compression.step.plans
        assert engine.compression.may_report_late == any(plan.may_report_late for plan in of_step)
        plans.extend(of_step)
        return run_plans(blocks_of)

    monkeypatch.setattr(engine.compression, "run_plans", watched)
    extra = compression("h2o", budget=64, interval=4)
    # The last but one token completes the fifth compression, of which the last output tells.
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True, extra_args=extra)
    engine.tokens([random_prompt(np.random.default_rng(4), 100)], params)
    assert [plan.may_report_late for plan in plans] == [False, True, True, True, False]
