"""The whole demo, with a small model; what the report shows, and what stands in the README."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import side_by_side
import transformers
from smollm2 import page, picture
from smollm2.contenders import CONTENDERS, OTHERS, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import generate_demo

ABOUT = {
    "model": "a <model>", "machine": "a machine", "threads": 2, "date": "2026-01-02T03:04:05", "tokens": 50,
    "versions": {"torch": "2", "transformers": "5"},
}  # fmt: skip


def result(name: str, size: float, agreement: float, rate: float | None = None) -> Result:
    recipe = None if name == "bf16" else f"recipe <{name}>"
    return Result(
        name, recipe, int(size * 1e6), int(size * 1e6), 0.1, agreement, 9.0, rate,
        rate and rate / 10, rate, "a text" if rate else "",
    )  # fmt: skip


RESULTS = [
    result("bf16", 200, 1.0, 10.0),
    result("int8", 100, 0.9, 20.0),
    result("int4", 60, 0.6, 30.0),
    result("worse", 70, 0.5),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    letters = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    made.save_pretrained(tmp_path / "small")
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.slow
def test_demo(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy.json"
    options = ["--tokens=64", "--new=4", "--rounds=1", "--out", str(out), "--json", str(copy)]
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", "--model", str(folder), *options])
    side_by_side.main()
    printed = capsys.readouterr().out
    assert "tokens; first after" in printed
    assert f"ao generate {out / 'int8'}" in printed
    data = json.loads(copy.read_text(encoding="utf-8"))
    assert data == json.loads((out / "report.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in data["results"]}
    assert list(rows) == [*CONTENDERS, *OTHERS]
    assert rows["bf16"]["kl_nats"] < rows["int8"]["kl_nats"] < rows["int4"]["kl_nats"] < 2
    assert rows["int4"]["disk_bytes"] < rows["int8"]["disk_bytes"] < rows["bf16"]["disk_bytes"]
    assert all((row["decode_rate"] or 0) > 0 for name, row in rows.items() if name in CONTENDERS)
    assert rows["nvfp4"]["decode_rate"] is None
    assert "int4" in (out / "report.html").read_text(encoding="utf-8")
    assert (out / "int4" / "config.json").is_file()


def test_the_line_joins_what_nothing_beats() -> None:
    assert [each.name for each in picture.pareto(RESULTS)] == ["int4", "int8", "bf16"]


def test_the_report_opens_with_the_pictures_and_needs_no_network() -> None:
    html = page.render(RESULTS, ABOUT)
    assert html.index("<svg") < html.index("<table")
    assert html.count("<svg") == 2
    assert not re.findall(r'(?:src|href)="', html)
    assert "a &lt;model&gt;" in html
    assert "<int8>" not in html
    assert len(html) < 30_000


def test_points_have_names_and_bars_lengths() -> None:
    space = "{http://www.w3.org/2000/svg}"
    points = ElementTree.fromstring(picture.size_and_quality(RESULTS))
    labels = [text.text for text in points.iter(f"{space}text")]
    assert {"bf16, 200 MB", "int8, 100 MB", "int4, 60 MB", "worse, 70 MB"} <= set(labels)
    heights = [float(circle.attrib["cy"]) for circle in points.iter(f"{space}circle")]
    assert heights == sorted(heights)  # from the best to the worst
    line = points.find(f"{space}polyline")
    assert line is not None
    assert len(line.attrib["points"].split()) == 3
    bars = ElementTree.fromstring(picture.speed(RESULTS))
    widths = [float(rect.attrib["width"]) for rect in bars.iter(f"{space}rect")]
    assert widths == pytest.approx([picture.WIDTH * share / 3 for share in (1, 2, 3)], abs=0.1)


def test_the_section_of_the_readme() -> None:
    row = {"name": "int8", "recipe": "r", "disk_bytes": 1e8, "kl_nats": 0.0123, "agreement": 0.945,
           "decode_rate": 20.4, "times_original": 2.04}  # fmt: skip
    section = generate_demo.section({"about": ABOUT, "results": [row, row | {"decode_rate": None}]})
    assert "| int8, `r` | 100 MB | 0.012 | 94% | 20 (2.0 ×) |" in section
    assert section.count("int8") == 1
    recorded = json.loads(generate_demo.RESULTS.read_text(encoding="utf-8"))
    assert all(math.isfinite(each["kl_nats"]) for each in recorded["results"])
