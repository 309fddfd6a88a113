"""The example that fine-tunes with QLoRA runs on a small random model, and its table has what it measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from ao_optim import AdamW8bit

EXAMPLE = Path(__file__).parents[2] / "examples" / "qlora.py"


def test_tiny(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("qlora_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)  # dataclasses look their module up
    spec.loader.exec_module(example)
    assert example.AdamW8bit is AdamW8bit
    options = ["--tiny", "--compare", "--lr", "1e-2", "--folder", str(tmp_path)]
    runs = example.main(options)
    assert list(runs) == ["QLoRA", "LoRA", "full fine-tuning"]
    for name in ("QLoRA", "LoRA"):
        losses = runs[name].losses
        assert len(losses) == 8
        assert losses[-1] < losses[0] - 0.05
        assert runs[name].held_out < losses[0]
        # nearly the same function at first
        assert abs(losses[0] - runs["LoRA"].losses[0]) < 0.1
    assert runs["QLoRA"].trained == runs["LoRA"].trained
    assert runs["QLoRA"].frozen < 0.6 * runs["LoRA"].frozen
    # tensors of this size keep dense state
    assert 0 < runs["QLoRA"].optimizer <= runs["LoRA"].optimizer
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert json.loads((tmp_path / "figures.json").read_text()).keys() == runs.keys()
    assert "A step of QLoRA takes" in capsys.readouterr().out
