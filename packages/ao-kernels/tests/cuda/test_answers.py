"""Known-answer tests on a device that is none: what is kept on disk, and that a capture tries nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ao_core import Call, Spec
from ao_core.ext import registry
from ao_kernels import answers
from ao_kernels.cuda import known_answer, records

LINEAR = registry.kernels.get("cuda_plane16_linear")
CALL = Call(
    "linear", Spec("int4", (1, 128), "bfloat16", layout="plane16"), (4096, 4096), (1, 4096),
    torch.bfloat16, "cuda",
)  # fmt: skip
DEVICE = torch.device("cuda", 0)


class Device:
    """What a test says about the device, and how often the kernels were asked."""

    def __init__(self) -> None:
        self.driver, self.capturing, self.made_from = 13000, False, ("library", "test")
        self.answer: str | None = None
        self.asked = 0

    def problem(self, linear: object, device: torch.device) -> str | None:
        assert device == DEVICE
        self.asked += 1
        return self.answer

    def properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name="H100", major=9, minor=0)


@pytest.fixture
def device(monkeypatch, tmp_path):
    found = Device()
    monkeypatch.setenv("AO_CACHE", str(tmp_path))
    monkeypatch.setattr(answers, "_found", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.properties)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: found.driver, raising=False)
    monkeypatch.setattr(records, "unavailable", lambda: None)
    monkeypatch.setattr(records, "current_device", lambda: DEVICE)
    monkeypatch.setattr(records, "_device", lambda: records._H100)
    monkeypatch.setattr(records, "_made_from", lambda: found.made_from)
    monkeypatch.setattr(known_answer, "problem", found.problem)
    return found


def test_right_answers_are_kept_on_disk_for_what_they_depend_on(device, tmp_path):
    assert LINEAR.refuses(CALL) is None
    assert LINEAR.refuses(CALL) is None
    assert device.asked == 1
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.relative_to(tmp_path).parts[0] == "cuda"
    for change, asked in (
        ({}, 1), ({"driver": 13010}, 2), ({"made_from": ("other", "test")}, 3), ({"driver": 13000}, 4),
        ({"made_from": ("library", "test")}, 4),
    ):  # fmt: skip
        vars(device).update(change)
        answers._found.clear()  # as in another process
        assert LINEAR.refuses(CALL) is None
        assert device.asked == asked, change


def test_a_wrong_answer_refuses_every_call_and_is_not_kept(device, tmp_path):
    device.answer = "their known-answer test failed: off"
    assert LINEAR.refuses(CALL) == device.answer
    assert registry.kernels.get("cuda_plane16_bytes_linear").refuses(CALL) == device.answer
    assert device.asked == 1
    assert not list(tmp_path.rglob("*"))


def test_nothing_is_tried_during_a_capture(device):
    device.capturing, device.answer = True, "wrong"
    assert LINEAR.refuses(CALL) is None
    assert device.asked == 0
    device.capturing = False
    assert LINEAR.refuses(CALL) == "wrong"


def test_memory_that_runs_out_says_nothing_about_a_kernel():
    def full(*arguments: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        known_answer.problem(full, torch.device("cpu"))


def test_what_the_kernels_are_made_from(monkeypatch, tmp_path):
    """Another library has other answers."""
    records._made_from.cache_clear()
    library, _ = records._made_from()
    other = tmp_path / "other.so"
    other.write_bytes(b"other")
    monkeypatch.setenv("AO_CPU_LIBRARY", str(other))
    records._made_from.cache_clear()
    assert records._made_from()[0] != library
    records._made_from.cache_clear()
