"""The checkpoint that is kept with the sources, and what its card says of it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from bytelm import data
from bytelm.evaluate import bits_per_byte
from bytelm.model import PRETRAINED, WEIGHTS, ByteLM, load

CARD = (PRETRAINED / "README.md").read_text(encoding="utf-8")
FIGURES = json.loads((PRETRAINED / "figures.json").read_text(encoding="utf-8"))


def said(pattern: str) -> str:
    """What the card says, as one match."""
    (found,) = re.findall(pattern, CARD)
    return found.replace(" ", "")


@pytest.fixture(scope="module")
def pretrained() -> ByteLM:
    return load()


def test_it_is_small(pretrained: ByteLM) -> None:
    parameters = sum(parameter.numel() for parameter in pretrained.parameters())
    assert parameters == FIGURES["parameters"] == int(said(r"([\d ]+) parameters"))
    assert parameters <= 8_000_000
    size = (PRETRAINED / WEIGHTS).stat().st_size
    assert 2 * parameters < size < 2 * parameters + 10_000 < 16_000_000


def test_it_predicts_a_text_as_well_as_the_card_says(pretrained: ByteLM) -> None:
    text = data.tokens((Path(__file__).parent / "sample.txt").read_bytes())
    found = bits_per_byte(pretrained, data.spread(text, FIGURES["measured"]["context"]))
    assert found == pytest.approx(float(said(r"sample\.txt`: ([\d.]+) bits per byte")), abs=0.002)


def test_card_and_figures_say_the_same() -> None:
    assert float(said(r"\*\*([\d.]+) bits per byte\*\*")) == FIGURES["bits_per_byte"]
    corpus = FIGURES["corpus"]
    assert said(r"sha256 `(\w+)`") == corpus["sha256"]
    for number in ("files", "bytes", "held_out_files", "held_out_bytes"):
        assert f"{corpus[number]:,}".replace(",", " ") in CARD, number


def test_curve_falls_to_the_figure() -> None:
    with (PRETRAINED / "curve.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    values = [float(row["bits_per_byte"]) for row in rows]
    assert values[0] > 2.5
    assert values[-1] == min(values)
    # other windows of the same text
    assert values[-1] == pytest.approx(FIGURES["bits_per_byte"], abs=0.05)
    assert int(rows[-1]["bytes"]) == FIGURES["training"]["bytes"]
