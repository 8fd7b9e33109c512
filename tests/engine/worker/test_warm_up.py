"""vLLM warms model runner V2 up with steps of its own, which must work and leave the worker's report alone."""

from types import SimpleNamespace

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.utils import KVBlockZeroer

from vllm_kvmerge.engine.messages import NO_STEP, Spent, attach, attached_report, is_scheduled
from vllm_kvmerge.engine.worker.cuda_runner_v2 import BlockZeroer
from vllm_kvmerge.engine.worker.reporting import Reporter
from vllm_kvmerge.engine.worker.timing import Timing


def test_blocks_are_zeroed_by_us_whatever_vllm_calls():
    zeroed = []
    zeroer = BlockZeroer(SimpleNamespace(zero_block_ids=zeroed.append))
    assert isinstance(zeroer, KVBlockZeroer)
    zeroer.warmup(7)
    zeroer.zero_block_ids([3, 4])
    assert zeroed == [[0], [3, 4]]


def test_a_report_waits_for_an_output_that_the_scheduler_gets():
    warm_up, step = SimpleNamespace(), SimpleNamespace()
    attach(step, NO_STEP)
    reporter, output = Reporter(), ModelRunnerOutput(req_ids=[], req_id_to_index={})
    kind = "{}", 10
    reporter.add_timings([Timing(kind, 600.0, 1.0, 1.5)], is_awaited=True)
    reporter.add_timings([Timing(kind, 300.0, 7.0, 7.25)], is_awaited=False)
    reporter.is_heard = is_scheduled(warm_up)
    assert reporter.attach_to(output) is output
    reporter.is_heard = is_scheduled(step)
    assert attached_report(reporter.attach_to(output)).spent == {kind: Spent(0.75, 900.0, 0.5)}
    assert reporter.attach_to(output) is output
