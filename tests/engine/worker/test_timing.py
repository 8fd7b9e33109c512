"""What compactions take, by a clock or by a GPU's events."""

import time

import torch

from vllm_kvmerge.engine.worker.timing import Timing, moment

KIND = "snapkv", 8


def test_seconds_of_a_clock():
    started = moment(torch.device("cpu"))
    time.sleep(0.01)
    assert 0.01 <= (Timing(KIND, 1.0, started, moment(torch.device("cpu"))).seconds or 0.0) < 10.0


def test_a_gpu_is_not_waited_for(monkeypatch):
    class Event:
        """Of a GPU that takes a millisecond for each event, and has come to some of them."""

        made, come = 0, 1

        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.made += 1
            self.number = Event.made

        def query(self) -> bool:
            return self.number <= Event.come

        def elapsed_time(self, end: "Event") -> float:
            return float(end.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    started, ended = (moment(torch.device("cuda")) for _ in range(2))
    timing = Timing(KIND, 1.0, started, ended)
    assert timing.seconds is None
    Event.come = 2
    assert timing.seconds == 0.001
