"""Write docs/hf/architectures.md: what works with which model of transformers, and with which recipe.

Each model is tried in a process of its own, so that a crash or a hang is a cell. Arguments are columns, in
place of all; cells of others are those of earlier runs, from build/architectures.json; --page tries no model.
Takes an hour.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hf" / "architectures.md"
RESULTS = ROOT / "build" / "architectures.json"
TRIALS = ROOT / "packages" / "ao-hf" / "tests" / "transformers"
#: seconds for one model
LIMIT = 2400
INTRO = """# Architectures of transformers

Small models with random weights, and three real ones, quantized to int8 with one scale per row
(`int8_weight_only`), on a CPU. `scripts/try_transformers.py` writes this page.
A cell is “yes”, or says what happens instead; “–” is what such a model does not do.

| column | what is compared |
| --- | --- |
| on the fly | outputs: those of `quantize_` on the loaded model; of the dequantized one, to 1e-4 |
| generate | tokens: greedy, without a cache, in a padded batch; beams and samples of the dequantized model |
| static cache | tokens: greedy with a cache of a fixed size |
| assisted | tokens: greedy with a draft of another model |
| save → load | outputs after `save_pretrained` in shards and `from_pretrained`, bit for bit |
| save again | files of the loaded model, tensor for tensor |
| ao quantize | parameters and outputs; files with those of `save_pretrained`, wherever names are the same |
| adapters | a training step of LoRA on all linear layers |
| new process | outputs of a process that imports ao_hf and loads the folder, bit for bit |
| compile | outputs under `torch.compile`, to 1e-3; breaks of the graph are counted |

"""
REAL = """
## What it costs the real models

{notes}

| model | measure | `int8_weight_only` | `int4_weight_only` |
| --- | --- | --- | --- |
"""
RECIPES = """
## Recipes

A small Llama has one linear layer for each recipe, of sizes that are no multiples of a group (48 × 80).
Format, parts and products of each layer are compared bit for bit. Recipes with dense weights are left out.

"""


def load(name: str, folder: Path = TRIALS) -> ModuleType:
    """A module that is in no package."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def quiet() -> None:
    """No warnings, and no bars of transformers."""
    warnings.simplefilter("ignore")
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def one(name: str, columns: Sequence[str]) -> None:
    """Try one model, and print the cells; a real one has a cell for what quantizing costs, too."""
    quiet()
    trials = load("architectures")
    real = load("real_models", ROOT / "scripts")
    if name not in real.MODELS:
        architecture = next(a for a in trials.ARCHITECTURES if a.name == name)
        print(json.dumps(trials.tried(architecture, columns=tuple(columns))))
        return
    if reason := real.missing(name):
        print(json.dumps(dict.fromkeys(columns, reason)))
        return
    found = trials.tried(real.architecture(trials, name), columns=tuple(columns))
    print(json.dumps(found | {"cost": real.cost(name)}))


def in_process(name: str, columns: Sequence[str]) -> dict[str, str]:
    """The cells of a model, tried in another process."""
    command = [sys.executable, __file__, "--one", name, *columns]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(columns, f"not done in {LIMIT // 60} minutes")
    if done.returncode:
        last = (done.stderr.splitlines() or [""])[-1][:160]
        return dict.fromkeys(columns, f"the process ended with {done.returncode}: {last}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(name: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {name} | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for row, cells in rows.items():
        texts = [cells.get(column, "not run").replace("|", "\\|") for column in columns]
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try what is asked for, and write the page."""
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], sys.argv[3:])
        return
    quiet()
    trials, recipes = load("architectures"), load("recipes")
    real = load("real_models", ROOT / "scripts")
    names = [*(a.name for a in trials.ARCHITECTURES), *real.MODELS]
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = [c for c in trials.COLUMNS if c in (sys.argv[1:] or trials.COLUMNS)]
    if wanted and wanted[0] != trials.COLUMNS[0]:
        wanted = [trials.COLUMNS[0], *wanted]  # which makes the model
    for name in names if sys.argv[1:] != ["--page"] else ():
        known[name] = known.get(name, {}) | in_process(name, wanted)
        print(f"{name}: {known[name]}", flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(known, indent=1), encoding="utf-8")
    rows = {name: known.get(name, {}) for name in names}
    page = INTRO + table("model", trials.COLUMNS, rows)
    page += REAL.format(notes=real.NOTES)
    costs = {name: rows[name].get("cost", "not run | – | –") for name in real.MODELS}
    page += "".join(f"| {name} | {cost} |\n" for name, cost in costs.items())
    with tempfile.TemporaryDirectory() as folder:
        tried = recipes.tried(Path(folder))
    rows = {f"`{name}`" if " " not in name else name: cells for name, cells in tried.items()}
    page += RECIPES + table("recipe", recipes.COLUMNS, rows)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
