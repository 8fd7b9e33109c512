"""When the sizes of caches reach the gauges."""

from vllm_kvmerge.engine import metrics
from vllm_kvmerge.engine.metrics import GAUGE_SECONDS, CacheGauges


def test_sizes_are_passed_on_when_they_change_at_once_or_after_a_while(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    gauges = CacheGauges(0, 1024)
    assert gauges.are_due(2, False)  # the first step
    now += 0.9 * GAUGE_SECONDS
    assert not gauges.are_due(2, False)  # caches only grow
    assert gauges.are_due(2, True)
    assert not gauges.are_due(2, False)
    assert gauges.are_due(1, False)  # a request has ended
    now += 0.9 * GAUGE_SECONDS
    assert not gauges.are_due(1, False)
    now += 0.2 * GAUGE_SECONDS
    assert gauges.are_due(1, False)
    assert gauges.are_due(0, False)  # all have: nothing stands for ever
