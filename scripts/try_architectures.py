"""Write docs/hf/architectures.md: what works with which architecture of transformers. Takes minutes."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hf" / "architectures.md"
TRIALS = ROOT / "packages" / "ao-hf" / "tests" / "transformers" / "architectures.py"
INTRO = """# Architectures of transformers

Small models with random weights, quantized to int8 with one scale per row (`int8_weight_only`), on a CPU.
`scripts/try_architectures.py` writes this page.
A cell is “yes”, or says what happens instead; “–” is what such a model does not do.

| column | what is compared |
| --- | --- |
| on the fly | outputs: those of `quantize_` on the loaded model; of the dequantized one, to 1e-4 |
| generate | greedy with and without a cache and in a padded batch, token for token; beams and samples run |
| save → load | outputs after `save_pretrained` in shards and `from_pretrained`, bit for bit |
| save again | files of the loaded model, tensor for tensor |
| ao quantize | outputs of a folder quantized without the model's code, with those of the first column |
| adapters | a training step of LoRA on all linear layers |
| new process | outputs of a process that imports ao_hf and loads the folder, bit for bit |
| compile | outputs under `torch.compile`, to 1e-3 |

"""


def trials() -> ModuleType:
    """The module of the tests that tries architectures."""
    spec = importlib.util.spec_from_file_location("architectures", TRIALS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Try all architectures in turn, and write the page; arguments are columns, in place of all."""
    warnings.simplefilter("ignore")
    module = trials()
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    lines = [
        f"| model | {' | '.join(module.COLUMNS)} |",
        "| --- " * (len(module.COLUMNS) + 1) + "|",
    ]
    for architecture in module.ARCHITECTURES:
        columns = tuple(c for c in module.COLUMNS if c in (sys.argv[1:] or module.COLUMNS))
        found = module.tried(architecture, columns=columns)
        cells = [found.get(c, "not run").replace("|", "\\|") for c in module.COLUMNS]
        lines.append(f"| {architecture.name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(INTRO + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
