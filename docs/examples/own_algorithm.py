"""An algorithm of your own: weights are clipped where that costs least on calibration data, then rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ao_core import (
    WHOLE,
    Algorithm,
    Config,
    Solved,
    Spec,
    quantize_,
    quantize_tensor,
    register,
    weight_only,
)
from ao_core.ext import ConfigError
from ao_core.ext.calibration import SQUARES


# --8<-- [start:config]
@dataclass(frozen=True)
class ClippedInt4Config(Config):
    """Symmetric int4, one scale per row, which gives up the largest weights where that pays."""

    steps: int = 10

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps!r}: must be positive, e.g. 10")


# --8<-- [end:config]


# --8<-- [start:solve]
SPEC = Spec("int4", (1, WHOLE), layout="packed")


def clip(weight, statistics, config, target):
    """(weight (E, N, K), statistics of each matrix's inputs, config, target) -> Solved."""
    squares = torch.stack([each["squares"] for each in statistics])  # (E, K): Σ x²
    best, least = weight, torch.full(weight.shape[:2], torch.inf, dtype=torch.float64)
    for step in range(config.steps):
        bound = weight.abs().amax(-1, keepdim=True) * (1 - 0.05 * step)
        clipped = weight.clamp(-bound, bound)
        change = quantize_tensor(clipped, SPEC).dequantize() - weight
        error = (change.double().square() * squares[:, None]).sum(-1)  # (E, N)
        best = torch.where((error < least)[..., None], clipped, best)
        least = torch.minimum(error, least)
    return Solved(best, weight_only("int4", "row"))


# --8<-- [end:solve]

# --8<-- [start:use]
register(Algorithm("clipped_int4", ClippedInt4Config, lambda config: (SQUARES,), clip))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)).eval()
for layer in (model[0], model[2]):
    nn.init.normal_(layer.weight, std=0.05)
batches = [torch.randn(32, 256) * torch.logspace(0, -2, 256) for _ in range(8)]

report = quantize_(model, ClippedInt4Config(), data=batches)
for record in report.with_status("changed"):
    print(
        f"{record.fqn}: {record.rows} rows, {record.error_vs_rtn:.2f} of the error of rounding"
    )
    assert 0.3 < record.error_vs_rtn < 0.95
print(report.calibration)
# --8<-- [end:use]
