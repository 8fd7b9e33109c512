"""How many kernels a compaction launches on a GPU, counted without one, and that a step that decodes waits for none."""

import os

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from tests.engine.cuda.launch_counts import of_policy  # noqa: E402
from vllm_kvmerge.policies import PRESETS  # noqa: E402

AT_MOST = {
    "local": (40, 30), "streaming_llm": (40, 40), "h2o": (40, 30), "snapkv": (40, 40), "keepkv": (130, 80),
    "zsmerge": (130, 110), "weightedkv": (60, 60), "morphkv": (50, 50), "criticalkv": (420, 420), "grkv": (250, 240),
    "tova": (40, 40), "random": (100, 100), "knorm": (40, 40), "keydiff": (60, 60), "rkv": (270, 260),
    "cam": (40, 180), "d2o": (600, 600), "kvmerger": (110, 110), "asymkv": (430, 340), "pyramidkv": (60, 50),
    "pyramidinfer": (60, 40), "expected_attention": (130, 130), "compactor": (200, 190), "adakv": (70, 70),
    "kvzip": (70, 70), "kvzap": (80, 80),
}  # fmt: skip
"""Kernels of a compaction at a prompt's end, and while a request generates: as many as there are, rounded up. Aims: 40
for h2o and snapkv, 120 for keepkv, zsmerge and weightedkv, 250 for grkv and adakv."""

WAITS = {"d2o": 1, "adakv": 2, "kvzip": 2, "kvzap": 2}
"""Times that the GPU is waited for at a prompt's end, where budgets follow data; never while a request generates."""


@pytest.mark.parametrize("policy", PRESETS)
def test_compactions(policy):
    first, second = of_policy(policy)
    for step, most in zip((first, second), AT_MOST[policy], strict=True):
        assert sum(step.kernels.values()) <= most, step.kernels
    assert sum(first.waits.values()) == WAITS.get(policy, 0) and not second.waits


def test_launches_do_not_grow_with_requests():
    """Of one shape, but for queries and scores of prompts."""
    few, many = (of_policy("keepkv", lengths)[1].kernels for lengths in ((150, 190), (150, 170, 190, 200, 230)))
    assert few == many
