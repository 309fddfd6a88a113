"""What calibrated algorithms cost a vision transformer that is trained here, on scikit-learn's digits.

`python algorithms.py --json algorithms.json`. Each seed trains a model of its own, within a minute, and
calibrates it on other images. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import train
from torch import Tensor, nn

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / name) for name in ("minilm", "calibrated")
)
from calibrated.cells import NEAREST, cells_of
from calibrated.run import Subject, made_by_ao, measure

_WEIGHTS = (NEAREST, "importance", "GPTQ")
TABLE: list[tuple[str, tuple[str, ...]]] = [
    ("int4 g128", _WEIGHTS),
    ("int3 g64", _WEIGHTS),
    ("int2 g64", _WEIGHTS),
    ("trellis 2", (NEAREST, "GPTQ")),
    ("int8", (NEAREST,)),
    ("W8A8", (NEAREST, "SmoothQuant")),
    ("W4A4 int4", (NEAREST, "GPTQ", "rotation, GPTQ")),
    ("W4A4 mxfp4", (NEAREST, "GPTQ", "block rotation, GPTQ")),
    # what takes most time
    *((name, ("AutoRound",)) for name in ("int4 g128", "int3 g64", "int2 g64")),
]
#: images to calibrate on, 16 tokens each, and in each batch
_IMAGES, _BATCH = 512, 64


def main() -> None:
    args = parse_args()
    learn, held_out = train.load()

    @cache
    def original(seed: int) -> nn.Module:
        return train.train(learn, seed)

    @cache
    def wanted(seed: int) -> Tensor:
        return original(seed)(held_out.pixels).double().log_softmax(-1)

    def data(seed: int) -> list[Tensor]:
        order = torch.randperm(len(learn.labels), generator=torch.Generator().manual_seed(seed))
        return list(learn.pixels[order[:_IMAGES]].split(_BATCH))

    def quality(seed: int, made: nn.Module) -> dict[str, float]:
        found, logs = made(held_out.pixels).double().log_softmax(-1), wanted(seed)
        right = [
            float((each.argmax(-1) == held_out.labels).double().mean()) for each in (found, logs)
        ]
        return {
            "kl_nats": float(F.kl_div(found, logs, log_target=True, reduction="batchmean")),
            "top1": right[0],
            "top1_of_original": right[1],
            "agreement": float((found.argmax(-1) == logs.argmax(-1)).double().mean()),
        }

    about = {"images": len(held_out.labels), "calibration_images": _IMAGES}
    subject = Subject(original, data, quality)
    cells = cells_of(TABLE, args.seeds)
    measure(args.json, about, cells, subject, lambda dense, cell: made_by_ao(subject, dense, cell))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="figures; those there are kept")
    parser.add_argument("--seeds", type=int, default=3, help="models, and calibration images (3)")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
