"""The time of a launch, with events that stand in for those of a device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from ao_kernels.triton.tuning import measure


class Event:
    """Tells times of a clock that each launch moves on."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, end):
        return end.at - self.at


def test_the_median_of_launches_in_seconds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1 << 10)
    )
    monkeypatch.setattr(measure, "_SCRATCH", 1 << 12)
    milliseconds = iter([5.0] + [2.0] * 5 + [3.0] * 4)

    def run():
        Event.now += next(milliseconds)

    assert measure.seconds_of(run, torch.device("cpu")) == 0.0025
    assert next(milliseconds, None) is None
