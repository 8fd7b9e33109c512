"""When the sizes of caches reach the gauges."""

from vllm_kvmerge.engine import metrics
from vllm_kvmerge.engine.metrics import _LIVE, GAUGE_SECONDS, CacheGauges
from vllm_kvmerge.engine.usage import CacheSize


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


def test_a_policy_whose_last_request_has_ended_holds_nothing():
    gauges = CacheGauges(0, 1024)
    read = [gauge.labels("h2o", 0)._value.get for gauge in _LIVE]
    gauges.update([("h2o", CacheSize(9, 12, 3)), ("h2o", CacheSize(1, 1, 1))])
    assert [get() for get in read] == [10, 13, 4 * 1024, 0]
    gauges.update([("snapkv", CacheSize(5, 5, 1))])
    assert [get() for get in read] == [0] * 4
