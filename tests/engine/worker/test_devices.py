"""Parts make no tensor without saying on which device: on a GPU it would be on the wrong one."""

import pytest
import torch

from tests.engine.worker.test_batches import Worker
from vllm_kvmerge import ops
from vllm_kvmerge.policies import PRESETS, CompressionPolicy


@pytest.fixture
def elsewhere(monkeypatch):
    """Policies run where a tensor whose device is not said has no values and goes with no other."""
    for method in ("compress", "layer_statistic"):
        original = getattr(CompressionPolicy, method)

        def run(*args, original=original):
            with torch.device("meta"):
                return original(*args)

        monkeypatch.setattr(CompressionPolicy, method, run)
    ops.choose("reference")  # the native operators are the CPU's own
    yield
    ops.choose(None)


CASES = [(policy, {}) for policy in PRESETS]
CASES += [("keydiff", {"merger": "attention_matching"}), ("h2o", {"allocator": "threshold", "threshold": 0.01})]
"""Presets, and the parts that are in none of them."""


@pytest.mark.parametrize(("policy", "fields"), CASES, ids=str)
def test_every_part(policy, fields, elsewhere):
    worker = Worker(policy, (150, 150), **fields)
    worker.compactor.run(worker.first)
    worker.compactor.run(worker.second)
