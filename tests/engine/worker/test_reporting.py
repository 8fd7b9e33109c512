"""What workers report: numbers of merged and evicted entries, and how long compactions took."""

from types import SimpleNamespace

import torch

from vllm_kvmerge.engine.worker import reporting
from vllm_kvmerge.engine.worker.reporting import EntryCounts
from vllm_kvmerge.engine.worker.timing import Timing


def test_entries_of_all_requests_of_a_policy_are_counted(monkeypatch):
    counted = []
    monkeypatch.setattr(reporting, "count_entries", lambda *numbers: counted.append(numbers))
    counts = torch.tensor([[1, 20, 0, 5, 9], [300, 4000, 2, 5, 9], [50000, 600000, 1, 5, 9]])
    EntryCounts(engine=3).add(["keepkv", "h2o", "keepkv"], counts)
    assert sorted(counted) == [("h2o", 3, 300, 4000, 2), ("keepkv", 3, 50001, 600020, 1)]


def test_a_gpus_events_are_not_waited_for():
    start = SimpleNamespace(elapsed_time=lambda end: 250.0)  # milliseconds
    for has_come, seconds in ((False, None), (True, 0.25)):
        end = SimpleNamespace(query=lambda has_come=has_come: has_come)
        assert Timing(("snapkv", 8), 1.0, start, end).seconds == seconds
