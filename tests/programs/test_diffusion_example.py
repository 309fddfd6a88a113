"""The example that quantizes a pipeline runs on its own tiny one, and draws nearly the same image."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "diffusion.py"


def test_tiny(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE)])
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    made = runpy.run_path(str(EXAMPLE))
    assert 10 < made["difference"] < 60
    assert made["image"].shape == (3, 32, 32)
    dense, quantized = (
        made["memory_footprint"](made[name].unet) for name in ("dense", "quantized")
    )
    assert quantized < 0.3 * dense
    assert (tmp_path / "files" / "unet" / "diffusion_pytorch_model.safetensors").is_file()
    assert "unet: " in capsys.readouterr().out
