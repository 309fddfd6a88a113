"""Notebooks are made of scripts that the tests run, and their cells run one after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import generate_notebooks
from ao_core.testing.warm import run_python

NOTEBOOKS = sorted((generate_notebooks.EXAMPLES / "notebooks").glob("*.ipynb"))
#: as Jupyter does it: no __file__, options of its own, another working folder
CELLS = """
import json, sys, types
sys.modules["ipykernel"] = types.ModuleType("ipykernel")
path, sys.argv = sys.argv[1], ["ipykernel_launcher.py", "--tiny"]
globals().pop("__file__", None)
for cell in json.load(open(path, encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]))
"""
PRINTED = {
    "diffusion": ["unet: "],
    "quantize_and_chat": ["15 weights quantized", "## Quantization", "int4_weight_only  "],
    "qlora": ["weights and optimizer", "adapter, plot and figures are in qlora"],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run(path: Path, tmp_path: Path) -> None:
    done = run_python("-c", CELLS, path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for text in PRINTED.get(path.stem, []):
        assert text in done.stdout
    assert done.stdout.strip()


def test_notebooks_are_those_of_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate_notebooks.py", "--check"])
    assert generate_notebooks.main() == 0
    assert [path.stem for path in NOTEBOOKS] == [p.stem for p in generate_notebooks.scripts()]

    script = "# %% [markdown]\n# # Title\n\n# %%\nx = 1\n\n\n# %%\nprint(x)\n"
    (tmp_path / "one.py").write_text(script)
    (tmp_path / "none.py").write_text("print(1)\n")
    assert generate_notebooks.main(tmp_path) == 1
    assert "notebooks/one.ipynb: not fresh" in capsys.readouterr().err
    assert not (tmp_path / "notebooks").exists()
    monkeypatch.setattr(sys, "argv", ["generate_notebooks.py"])
    assert generate_notebooks.main(tmp_path) == 0
    made = json.loads((tmp_path / "notebooks" / "one.ipynb").read_text())
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in made["cells"]]
    assert cells == [("markdown", "# Title"), ("code", "x = 1"), ("code", "print(x)")]
    assert not any(cell.get("outputs") for cell in made["cells"])
    (tmp_path / "one.py").unlink()
    assert generate_notebooks.main(tmp_path) == 0
    assert not list((tmp_path / "notebooks").iterdir())
