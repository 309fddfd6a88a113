"""What static scales of activations cost MiniLM, next to dynamic ones.

`python static_scales.py --json static.json`. Texts that scales are found on and those that are measured are
distinct. A run goes on where the one before ended.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from minilm_demo import minilm
from minilm_demo.corpus import separate_pairs
from minilm_demo.metrics import quality
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "calibrated"))
from calibrated.static import StaticSubject, measure_static

#: texts that scales are found on, pairs of texts that are measured, and tokens after which all are cut
CALIBRATION, PAIRS, TOKENS = 100, 200, 96


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="figures; those there are kept")
    path = parser.parse_args().json
    dense = minilm.load()
    seen, measured = separate_pairs(PAIRS)
    seen = seen[:CALIBRATION]
    batches = minilm.tokenize([pair.document for pair in seen], TOKENS)
    data = minilm.inputs(batches)
    texts = [
        minilm.tokenize([pair.query for pair in measured], TOKENS),
        minilm.tokenize([pair.document for pair in measured], TOKENS),
    ]
    original = [minilm.encode(dense, each) for each in texts]

    def measure(made: nn.Module) -> dict[str, float]:
        found = quality(*(minilm.encode(made, each) for each in texts), *original)
        noise = 10 ** (-found.output_sqnr_db / 10)
        return {"noise": noise, "cosine_mean": found.cosine_mean, "agreement": found.agreement}

    about = {
        "tokens": sum(int(batch.mask.sum()) for each in texts for batch in each),
        "calibration_tokens": sum(int(batch.mask.sum()) for batch in batches),
    }
    subject = StaticSubject(partial(minilm.share, dense), data, measure)
    measure_static(path, about, subject)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
