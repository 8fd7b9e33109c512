"""Parts make no tensor without saying on which device: on a GPU it would be on the wrong one."""

import pytest
import torch

from tests.engine.worker.test_batches import Worker
from vllm_kvmerge import ops
from vllm_kvmerge.policies import PARTS, PRESETS, CompressionPolicy
from vllm_kvmerge.request.parameters import CompressionError

LENGTHS = (150, 150)
PARTS_BY_NAME = [(kind, name) for kind, parts in PARTS.items() for name in parts]


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


def compress_twice(worker: Worker) -> None:
    worker.compactor.run(worker.first)
    worker.compactor.run(worker.second)


@pytest.mark.parametrize("policy", PRESETS)
def test_presets(policy, elsewhere):
    compress_twice(Worker(policy, LENGTHS))


@pytest.mark.parametrize(("kind", "name"), PARTS_BY_NAME)
def test_parts(kind, name, elsewhere):
    """Each part in the first preset that it goes with."""
    for policy in PRESETS:
        try:
            worker = Worker(policy, LENGTHS, **{kind: name})
        except CompressionError:
            continue
        compress_twice(worker)
        return
    pytest.fail("goes with no preset")


def test_a_tensor_elsewhere_is_noticed(elsewhere, monkeypatch):
    worker = Worker("h2o", LENGTHS)
    selector = type(worker.config.policy.selector)
    select = selector.select
    monkeypatch.setattr(selector, "select", lambda *args: select(*args) + torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(Exception, match="meta"):
        compress_twice(worker)
