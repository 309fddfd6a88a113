"""What calibrated algorithms cost the byte model, compared with rounding to nearest in the same format.

`python algorithms.py --json algorithms.json`. They are calibrated on files that the model was trained on and
measured on files that it was not. A run goes on where the one before ended.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from bytelm import data, evaluate, model
from torch import Tensor, nn

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / name) for name in ("minilm", "calibrated")
)
from calibrated.cells import NEAREST, cells_of
from calibrated.run import Subject, made_by_ao, measure

TABLE: list[tuple[str, tuple[str, ...]]] = [
    ("int4 g128", (NEAREST, "importance", "AWQ", "GPTQ")),
    ("int3 g64", (NEAREST, "importance", "AWQ", "GPTQ")),
    ("int2 g64", (NEAREST, "importance", "GPTQ")),
    ("trellis 2", (NEAREST, "GPTQ")),
    ("int8", (NEAREST,)),
    ("W8A8", (NEAREST, "SmoothQuant")),
    ("W4A4 int4", (NEAREST, "GPTQ", "rotation, GPTQ")),
    ("W4A4 mxfp4", (NEAREST, "GPTQ", "block rotation, GPTQ")),
    # what takes most time
    ("int3 g64", ("AutoRound",)),
    ("int2 g64", ("AutoRound",)),
]
#: bytes of a window
_CONTEXT = 512


def main() -> None:
    args = parse_args()
    corpus, original = data.read_corpus(), model.load()
    windows = data.spread(corpus.held_out, _CONTEXT, args.windows)
    wanted = evaluate.predict(original, windows)

    def calibration(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = data.sample(corpus.train, args.bytes // _CONTEXT, _CONTEXT, generator)
        return list(drawn.split(1))

    def quality(seed: int, made: nn.Module) -> dict[str, float]:
        found = asdict(evaluate.quality(wanted, evaluate.predict(made, windows), windows))
        return {"kl_nats": found.pop("kl_bits") * math.log(2), **found}

    about = {"bytes": windows.numel() // 2, "calibration_bytes": args.bytes}
    subject = Subject(lambda _: original, calibration, quality)
    cells = cells_of(TABLE, args.seeds)
    measure(args.json, about, cells, subject, lambda dense, cell: made_by_ao(subject, dense, cell))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="figures; those there are kept")
    parser.add_argument("--windows", type=int, default=64, help="of 256 bytes that are judged (64)")
    parser.add_argument("--bytes", type=int, default=8192, help="to calibrate on (8192)")
    parser.add_argument("--seeds", type=int, default=3, help="calibration texts (3)")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
