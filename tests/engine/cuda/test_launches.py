"""How many kernels a compaction launches on a GPU, counted without one, and that a step that decodes waits for none."""

import os

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from tests.engine.cuda.launch_counts import of_policy  # noqa: E402
from vllm_kvmerge.policies import PRESETS  # noqa: E402

AT_MOST = {
    "local": 40, "streaming_llm": 40, "h2o": 40, "snapkv": 40, "keepkv": 70, "zsmerge": 110, "weightedkv": 50,
    "morphkv": 50, "criticalkv": 440, "grkv": 250, "tova": 40, "random": 100, "knorm": 40, "keydiff": 60, "rkv": 270,
    "cam": 180, "d2o": 570, "kvmerger": 100, "asymkv": 370, "pyramidkv": 50, "pyramidinfer": 40,
    "expected_attention": 130, "compactor": 200, "adakv": 70, "kvzip": 80, "kvzap": 80,
}  # fmt: skip
"""Kernels of a compaction while a request generates: as many as there are, rounded up. Aims: 40 for h2o and snapkv, 120
for keepkv, zsmerge and weightedkv, 250 for grkv and adakv."""

AT_PROMPTS_ENDS = {
    "h2o": 40, "snapkv": 40, "keepkv": 120, "zsmerge": 120, "weightedkv": 60, "grkv": 250, "adakv": 80,
}  # fmt: skip
"""The same where a prompt ends, of policies with an aim."""


@pytest.mark.parametrize("policy", PRESETS)
def test_compactions(policy):
    first, second = of_policy(policy)
    assert sum(first.kernels.values()) <= AT_PROMPTS_ENDS.get(policy, 600), first.kernels
    assert sum(second.kernels.values()) <= AT_MOST[policy], second.kernels
    assert not second.waits


@pytest.mark.parametrize("policy", ["h2o", "keepkv", "zsmerge", "weightedkv"])
def test_unlike_budgets_are_one_batch(policy):
    """At most nine kernels more than equal ones, for what differs by row, block tables among it."""
    alike = of_policy(policy, (150,) * 4)[1]
    unlike = of_policy(policy, (150, 170, 190, 230), budgets=(50, 40, 60, 33))[1]
    assert sum(unlike.kernels.values()) - sum(alike.kernels.values()) <= 9, (alike.kernels, unlike.kernels)
    assert not unlike.waits


def test_launches_do_not_grow_with_requests():
    """But for queries and scores of prompts."""
    few, many = (of_policy("keepkv", lengths)[1].kernels for lengths in ((150, 190), (150, 170, 190, 200, 230)))
    assert few == many
