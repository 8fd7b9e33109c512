"""Numbers of merged and evicted entries on their way to the metrics."""

import torch

from vllm_kvmerge.engine.worker import reporting
from vllm_kvmerge.engine.worker.reporting import EntryCounts


def test_entries_of_all_requests_of_a_policy_are_counted(monkeypatch):
    counted = []
    monkeypatch.setattr(reporting, "count_entries", lambda *numbers: counted.append(numbers))
    counts = torch.tensor([[1, 20, 0, 5, 9], [300, 4000, 2, 5, 9], [50000, 600000, 1, 5, 9]])
    EntryCounts(engine=3).add(["keepkv", "h2o", "keepkv"], counts)
    assert sorted(counted) == [("h2o", 3, 300, 4000, 2), ("keepkv", 3, 50001, 600020, 1)]
