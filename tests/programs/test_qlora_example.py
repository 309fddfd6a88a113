"""The example that fine-tunes with QLoRA, and its benchmark, run on a small random model."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ao_optim import AdamW8bit

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "qlora.py"
BENCHMARK = ROOT / "packages" / "ao-hf" / "benchmarks" / "qlora.py"


def script(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_tiny(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = script(EXAMPLE, "qlora", monkeypatch)
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


def test_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds, then a third that is added; all arms of a seed see the same batches."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    script(EXAMPLE, "qlora", monkeypatch)
    benchmark = script(BENCHMARK, "qlora_benchmark", monkeypatch)
    path = tmp_path / "qlora.json"
    options = ["qlora", "--tiny=1", "--steps=3", "--context=16", f"--json={path}"]
    for seeds in ("2", "3"):
        monkeypatch.setattr(sys, "argv", [*options, f"--seeds={seeds}"])
        benchmark.main()
    data = json.loads(path.read_text(encoding="utf-8"))
    assert list(data["runs"]) == ["0", "1", "2"]
    lora, ours, zero = data["rows"]
    assert (lora["seeds"], ours["seeds"], zero["seeds"]) == (3, 3, 1)
    for seed, runs in data["runs"].items():
        assert list(runs) == [row["arm"] for row in data["rows"]][: 3 if seed == "0" else 2]
        first = [run["losses"][0] for run in runs.values()]
        assert max(first) - min(first) < 0.2
        assert all(len(run["losses"]) == len(run["seconds"]) == 3 for run in runs.values())
    assert len({runs["QLoRA"]["losses"][0] for runs in data["runs"].values()}) == 3
    assert float(lora["training loss"]) == pytest.approx(
        statistics.mean(sum(runs[lora["arm"]]["losses"]) / 3 for runs in data["runs"].values()),
        abs=1e-3,
    )
    assert data["text"].count("| full fine-tuning |") == 1
    assert path.with_suffix(".svg").read_text(encoding="utf-8").startswith("<?xml")
