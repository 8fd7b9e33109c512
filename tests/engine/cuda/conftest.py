import pytest

from vllm_kvmerge.engine.attention import cuda, rows
from vllm_kvmerge.engine.worker import warm_up


@pytest.fixture
def gpu(monkeypatch):
    """Triton's operators, and shapes that are cut into programs as for an H200."""
    from vllm_kvmerge.ops import triton

    monkeypatch.setattr("vllm_kvmerge.ops.triton.plan.device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("vllm_kvmerge.ops.triton.plan.multiprocessors", lambda device: 132)
    for module in (cuda, rows, warm_up.ops):
        for name in ("paged_attention", "write_tokens", "keep_queries", "score_prompt_queries", "score_repetition"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(triton, name))
