"""Conversions lose what the table says that they lose, and no more."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

LOSSLESS = runpy.run_path(str(Path(__file__).with_name("lossless.py")))


@pytest.mark.parametrize(
    "case", LOSSLESS["CASES"], ids=lambda case: f"{case.source}-{case.target}-{case.what}"
)
def test_the_verdict_on_a_conversion(case) -> None:
    verdict = LOSSLESS["verdict_on"](case)
    assert verdict.verdict in case.expected, verdict
    assert verdict.sqnr is None or verdict.sqnr >= case.least
