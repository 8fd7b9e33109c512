"""What the CPU's worker leaves of its memory for the KV cache."""

from copy import copy
from dataclasses import replace

import pytest
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvmerge.engine.arguments import request_limits
from vllm_kvmerge.engine.worker.cpu_worker import KVMergeWorker


@pytest.fixture
def worker(engine, monkeypatch) -> KVMergeWorker:
    """A worker that vLLM has found 8 GiB for, without a model."""
    worker = KVMergeWorker.__new__(KVMergeWorker)
    worker.vllm_config = engine.scheduler.vllm_config
    worker.cache_config = copy(worker.vllm_config.cache_config)
    worker.cache_config.kv_cache_memory_bytes = None
    monkeypatch.setattr(CPUWorker, "determine_available_memory", lambda self: 8 << 30)
    return worker


def test_what_running_requests_keep_is_left_out(worker):
    kept = request_limits(worker.vllm_config).kept_bytes
    assert kept > 1 << 20
    assert worker.determine_available_memory() == (8 << 30) - kept
    worker.cache_config.kv_cache_memory_bytes = 1 << 30
    assert worker.determine_available_memory() == 8 << 30, "it is what was asked for"


def test_too_little_memory_is_refused(worker, monkeypatch):
    monkeypatch.setattr(CPUWorker, "determine_available_memory", lambda self: 1 << 20)
    with pytest.raises(ValueError, match="allowed: more by --gpu-memory-utilization"):
        worker.determine_available_memory()


def test_what_is_kept_is_bounded(engine):
    limits = replace(request_limits(engine.scheduler.vllm_config), pool_bytes=None)
    scores, rings = limits.prompt_score_bytes(4096), limits.ring_bytes(4096, 4096)
    assert limits.kept_bytes == min(4 * limits.max_bytes, 32 * (scores + rings))
    assert replace(limits, max_num_seqs=2).kept_bytes == 2 * (scores + rings)
    assert replace(limits, max_bytes=1 << 20).kept_bytes == 4 << 20
    one = replace(limits, max_num_seqs=1).kept_bytes
    assert replace(limits, pool_bytes=8 * one).kept_bytes == 2 * one
    assert replace(limits, pool_bytes=one).kept_bytes == one, "a single request can run"
