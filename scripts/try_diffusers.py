"""Write docs/hf/diffusers-architectures.md: what works with which model of diffusers. Takes minutes."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hf" / "diffusers-architectures.md"
TRIALS = ROOT / "packages" / "ao-hf" / "tests" / "diffusers" / "architectures.py"
INTRO = """# Architectures of diffusers

Small models with random weights, quantized to int8 with one scale per row (`int8_weight_only`), on a CPU.
`scripts/try_diffusers.py` writes this page; tests try most of it in int4, too.
A cell is “yes”, or says what happens instead.

| column | what is compared |
| --- | --- |
| on the fly | outputs: those of `quantize_` on the loaded model; of the dequantized one, to 1e-4; memory |
| save → load | outputs after `save_pretrained` in one file or shards and `from_pretrained`, bit for bit |
| save again | files of the loaded model, tensor for tensor |
| ao quantize | outputs of a folder quantized without the model's code, bit for bit |
| adapters | a training step of LoRA on all linear layers |
| new process | outputs of a process that imports ao_hf and loads the folder, bit for bit |
| compile | outputs under `torch.compile(fullgraph=True)`, to 1e-3 |

"""


def trials() -> ModuleType:
    """The module of the tests that tries architectures."""
    spec = importlib.util.spec_from_file_location("diffusers_architectures", TRIALS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Try architectures and write the page; arguments are names of those to try, in place of all."""
    warnings.simplefilter("ignore")
    module = trials()
    from diffusers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    before = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    rows = {line.split(" | ")[0].strip("| "): line for line in before}
    head = [f"| model | {' | '.join(module.COLUMNS)} |", "| --- " * (len(module.COLUMNS) + 1) + "|"]
    names = [architecture.name for architecture in module.ARCHITECTURES]
    for architecture in module.ARCHITECTURES:
        name = architecture.name
        if name in (sys.argv[1:] or names):
            found = module.tried(architecture)
            cells = [found[column].replace("|", "\\|") for column in module.COLUMNS]
            rows[name] = f"| {name} | {' | '.join(cells)} |"
            print(rows[name], flush=True)
        body = [rows[each] for each in names if each in rows]
        PAGE.write_text(INTRO + "\n".join([*head, *body]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
