"""What static scales of activations cost SmolLM2-135M, next to dynamic ones.

`python static.py --json static.json`. Scales are found on docstrings of the standard library, and measured on
other text, the sections of Python's documentation. A run goes on where the one before ended.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from algorithms import calibration, original
from smollm2 import evaluate, model
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "calibrated"))
from calibrated.static import StaticSubject, measure_static

#: tokens that scales are found on, and windows of 512 tokens that are measured
CALIBRATION, WINDOWS = 2048, 4
#: a head that is tied to the embedding, which static recipes leave alone
DENSE = ("model.embed_tokens", "lm_head")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="figures; those there are kept")
    path = parser.parse_args().json
    dense = original(0)
    windows = evaluate.spread(model.tokens(evaluate.text()), WINDOWS)
    logs = evaluate.predict(dense, windows)

    def measure(made: nn.Module) -> dict[str, float]:
        return asdict(evaluate.quality(logs, windows, partial(evaluate.predict, made)))

    about = {"tokens": windows.numel(), "calibration_tokens": CALIBRATION}
    subject = StaticSubject(
        partial(model.share, dense), calibration(CALIBRATION, 0), measure, DENSE
    )
    measure_static(path, about, subject)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
