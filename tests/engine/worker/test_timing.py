"""What compactions take, by a GPU's events."""

import torch

from vllm_kvmerge.engine.worker.timing import Timing, moment


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
    timing = Timing(("snapkv", 8), 1.0, started, ended)
    assert timing.seconds is None
    Event.come = 2
    assert timing.seconds == 0.001
