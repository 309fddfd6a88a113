"""Measure the error of every number format on Gaussian weights, into docs/numerics.md.

With --check nothing is written, and the exit status says whether the page is fresh; machines may
differ by a tenth of a decibel.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch

from ao_core import WHOLE, DType, Spec, quantize_tensor
from ao_core.ext import registry
from ao_core.ext.numerics import sqnr
from doc_sections import main, table
from workspace import ROOT

PAGE = ROOT / "docs" / "numerics.md"
SHAPE = (256, 1024)
BLOCKS = {"groups of 32": (1, 32), "groups of 128": (1, 128), "rows of 1024": (1, WHOLE)}
MX = {"f8e4m3": "MXFP8", "f8e5m2": "MXFP8", "f6e3m2": "MXFP6", "f6e2m3": "MXFP6", "f4e2m1": "MXFP4"}


def weights() -> torch.Tensor:
    """The weights that everything is measured on."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def decibels(w: torch.Tensor, spec: Spec) -> str:
    """The SQNR of a format, as text."""
    return f"{float(sqnr(w, quantize_tensor(w, spec).dequantize())):.1f}"


def measured(dtype: DType) -> list[list[str]]:
    """One row for a format; unsigned integers have a zero point."""
    w = weights()
    unsigned = dtype.kind == "int" and dtype.min == 0
    zero_point = "int" if unsigned else "none"
    scales = "asymmetric" if unsigned else "symmetric"
    cells = [
        decibels(w, Spec(dtype.name, block, zero_point=zero_point)) for block in BLOCKS.values()
    ]
    rows = [[f"`{dtype.name}`", str(dtype.bits), scales, *cells]]
    if dtype.name in MX:
        mx = decibels(w, Spec(dtype.name, (1, 32), "e8m0"))
        rows.append([f"`{dtype.name}`", str(dtype.bits), f"e8m0, {MX[dtype.name]}", mx, "", ""])
    return rows


def sqnr_table() -> str:
    """All built-in formats, by their bits."""
    coded = [dtype for _, dtype in registry.dtypes.items() if dtype.has_scale]
    formats = sorted(coded, key=lambda dtype: (dtype.bits, dtype.kind != "int"))
    rows = [row for dtype in formats for row in measured(dtype)]
    return table(("format", "bits", "scales", *BLOCKS), rows)


def close(old: str, new: str) -> bool:
    """Equal but for numbers that differ by a tenth."""
    number = re.compile(r"\d+\.\d")
    if number.sub("#", old) != number.sub("#", new):
        return False
    pairs = zip(number.findall(old), number.findall(new), strict=True)
    return all(abs(float(a) - float(b)) < 0.11 for a, b in pairs)


if __name__ == "__main__":
    os.environ["AO_PLUGINS"] = ""  # built-in formats only
    sys.exit(main({(PAGE, "sqnr"): sqnr_table()}, Path(__file__).name, close))
