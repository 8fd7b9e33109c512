"""How many kernels a compaction launches on a GPU, counted without one, and that a step that decodes waits for none."""

import os

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from tests.engine.cuda.launch_counts import of_policy  # noqa: E402
from vllm_kvmerge.policies import PRESETS  # noqa: E402

AT_MOST = {"local": 40, "streaming_llm": 40, "h2o": 40, "snapkv": 50, "keepkv": 200, "zsmerge": 170, "weightedkv": 240}
"""Kernels while a request generates: as many as there are, rounded up (aims: 40, and 120 for the three that merge)."""

WAITING = {"grkv", "cam", "d2o", "asymkv", "adakv", "kvzip", "kvzap"}
"""Whose compactions read numbers of the GPU's."""


@pytest.mark.parametrize("policy", PRESETS)
def test_compactions_while_generating(policy):
    _, second = of_policy(policy)
    assert sum(second.kernels.values()) <= AT_MOST.get(policy, 1200), second.kernels
    assert bool(second.waits) == (policy in WAITING), second.waits


def test_launches_do_not_grow_with_requests():
    """But for the block tables that are put together, and queries and scores of prompts."""
    few, many = (of_policy("keepkv", lengths)[1].kernels for lengths in ((150, 150), (150,) * 5))
    assert sum(many.values()) - sum(few.values()) <= 3
