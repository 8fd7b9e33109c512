"""How many kernels a compaction launches on a GPU, counted without one, and that a step that decodes waits for none."""

import os

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from tests.engine.cuda.launch_counts import of_policy  # noqa: E402
from vllm_kvmerge.policies import PRESETS  # noqa: E402

AT_MOST = {
    "local": 40, "streaming_llm": 50, "h2o": 50, "snapkv": 60, "keepkv": 110, "zsmerge": 180, "weightedkv": 260,
    "morphkv": 60, "criticalkv": 540, "grkv": 270, "tova": 50, "random": 110, "knorm": 50, "keydiff": 70, "rkv": 300,
    "cam": 200, "d2o": 700, "kvmerger": 140, "asymkv": 410, "pyramidkv": 70, "pyramidinfer": 150,
    "expected_attention": 150, "compactor": 220, "adakv": 90, "kvzip": 90, "kvzap": 100,
}  # fmt: skip
"""Kernels of a compaction while a request generates: as many as there are, rounded up. Aims: 40 for h2o and snapkv, 120
for keepkv, zsmerge and weightedkv, 250 for grkv and adakv."""


@pytest.mark.parametrize("policy", PRESETS)
def test_compactions_while_generating(policy):
    _, second = of_policy(policy)
    assert sum(second.kernels.values()) <= AT_MOST[policy], second.kernels
    assert not second.waits


def test_launches_do_not_grow_with_requests():
    """But for the block tables that are put together, and queries and scores of prompts."""
    few, many = (of_policy("keepkv", lengths)[1].kernels for lengths in ((150, 150), (150,) * 5))
    assert sum(many.values()) - sum(few.values()) <= 3
