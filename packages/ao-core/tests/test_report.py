"""The report: totals, text, JSON, HTML, figure."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from ao_core.errors import ConfigError, MissingExtraError
from ao_core.report import ParameterRecord, Report, size_text


def quantized(fqn, sqnr_db=21.5, before=4000, after=600, tied=()):
    return ParameterRecord(
        fqn,
        "changed",
        "",
        (10, 100),
        before,
        after,
        spec="int4[1×32] scale=float32 packed",
        kernel="reference_linear",
        sqnr_db=sqnr_db,
        seconds=0.25,
        tied=tied,
    )


RECORDS = (
    quantized("embed.weight", tied=("head.weight",)),
    quantized("layers.0.weight", sqnr_db=math.inf),
    quantized("layers.1.weight", sqnr_db=None, before=3_000_000, after=500_000),
    ParameterRecord("layers.2.weight", "skipped", "<b>K</b> & odd", (3, 5), 60, 60),
    ParameterRecord("norm.weight", "unchanged", "it has 1 dimension(s)", (100,), 400, 400),
    ParameterRecord("norm.bias", "unchanged", "it has 1 dimension(s)", (100,), 400, 400),
)


@pytest.fixture
def report():
    return Report({"name": "int4", "args": {"group_size": 32}}, RECORDS)


class Page(HTMLParser):
    """What a page holds: tags with attributes, rows of cells, and whether all tags were closed."""

    VOID = ("meta", "input", "link", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.open, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID and not (
            tag in ("line", "rect") and self.get_starttag_text()[-2] == "/"
        ):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data
        if "script" not in self.open and "style" not in self.open:
            self.text += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def test_totals(report):
    assert report.bytes_before == 4000 + 4000 + 3_000_000 + 860
    assert report.bytes_after == 600 + 600 + 500_000 + 860
    assert report.coverage == pytest.approx(100 * 3_008_000 / 3_008_860)
    assert report.seconds == 0.75


def test_text_has_an_aligned_table(report):
    lines = str(report).splitlines()
    header, rule, *rows = lines[:5]
    assert header.split() == ["parameter", "shape", "format", "kernel", "before", "after", "SQNR"]
    assert set(rule) == {"-", " "}
    starts = [match.start() for match in re.finditer(r"-+", rule)]
    for row in rows:
        assert all(row[start - 1] == " " for start in starts[1:] if start <= len(row))
    assert rows[0].startswith("embed.weight = head.weight ")
    assert rows[0].endswith("4.0 kB     600 B  21.5 dB")
    assert rows[1].endswith("inf dB")
    assert rows[2].endswith("3.0 MB  500.0 kB")


def test_text_says_what_was_skipped_and_kept_and_the_totals(report):
    text = str(report)
    assert "skipped (1), though asked for:\n  layers.2.weight: <b>K</b> & odd" in text
    assert "unchanged (2):\n  2 × it has 1 dimension(s)" in text
    assert text.splitlines()[-1] == (
        "3 of 6 parameters changed, 100.0% of the bytes: 3.0 MB → 502.1 kB (16.7%) in 0.75 s"
    )


def test_text_of_nothing():
    assert str(Report({})) == (
        "0 of 0 parameters changed, 0.0% of the bytes: 0 B → 0 B (0.0%) in 0.00 s"
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (25_340_000, "25.3 MB"),
        (7_000_000_000, "7.0 GB"),
        (5_000_000_000_000_000, "5000.0 TB"),
    ],
)
def test_sizes(size, text):
    assert size_text(size) == text


def test_json_round_trip(report):
    data = json.loads(report.to_json(), parse_constant=pytest.fail)
    assert data["bytes_after"] == report.bytes_after
    assert [r["sqnr_db"] for r in data["records"]] == [21.5, "inf", None, None, None, None]
    assert Report.from_json(report.to_json()) == report


def test_json_of_nan():
    again = Report.from_json(Report({}, (quantized("w", math.nan),)).to_json())
    assert math.isnan(again.records[0].sqnr_db)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"config": {}, "records": [{"fqn": "w"}]}'])
def test_json_that_is_no_report(text):
    with pytest.raises(ConfigError, match="not a report"):
        Report.from_json(text)


def test_html_is_whole_and_asks_the_network_for_nothing(report):
    text = report.to_html()
    page = Page(text)
    links = [
        v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href", "srcset")
    ]
    assert links == []
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_html_has_all_parameters_and_totals(report):
    page = Page(report.to_html("MiniLM & co"))
    assert page.text.count("MiniLM & co") == 2
    header, *rows = page.rows
    assert len(header) == 8
    assert [row[0] for row in rows][:2] == ["embed.weight = head.weight", "layers.0.weight"]
    assert len(rows) == len(RECORDS)
    assert rows[0][1:] == [
        "changed", "10×100", "int4[1×32] scale=float32 packed", "reference_linear",
        "4.0 kB", "600 B", "21.5 dB",
    ]  # fmt: skip
    assert rows[3][3] == "<b>K</b> & odd"
    assert '"group_size": 32' in page.text


def test_a_column_for_sparsity_where_a_layout_leaves_something_out(report):
    assert "sparsity" not in str(report)
    assert "Sparsity" not in report.to_html()
    sparse = Report(report.config, (replace(RECORDS[0], sparsity=0.4375), *RECORDS[1:]))
    header, _, first, second = str(sparse).splitlines()[:4]
    assert header.endswith("sparsity")
    assert first.endswith("43.8%")
    assert second.endswith("inf dB")
    rows = Page(sparse.to_html()).rows
    assert [row[-1] for row in rows[:3]] == ["Sparsity", "43.8%", ""]
    assert Report.from_json(sparse.to_json()) == sparse


def test_html_is_accessible(report):
    page = Page(report.to_html())
    assert page.all("html")[0]["lang"] == "en"
    assert len(page.all("main")) == 1
    for image in page.all("svg"):
        assert image["role"] == "img"
        assert len(image["aria-label"]) > 20
    heads = page.all("th")
    assert all(head["scope"] in ("col", "row") for head in heads)
    assert len(page.all("label")) == len(page.all("input")) + len(page.all("select")) == 2


def test_html_draws_a_bar_a_value(report):
    page = Page(report.to_html())
    kinds = [rect["class"] for rect in page.all("rect")]
    # one finite SQNR; bytes of three parameters, before and after
    assert kinds == ["after"] + ["before", "after"] * 3
    heights = [float(rect["height"]) for rect in page.all("rect")]
    assert heights[5] / heights[6] == pytest.approx(6, rel=0.01)
    assert all(float(rect["y"]) >= 0 and float(rect["y"]) + h <= 200.01
               for rect, h in zip(page.all("rect"), heights, strict=True))  # fmt: skip


@pytest.mark.parametrize("records", [(), (quantized("w", -3.0, before=0, after=0),), RECORDS[3:]])
def test_html_of_little(records):
    report = Report({}, records)
    assert len(Page(report.to_html()).rows) == 1 + len(records)


def test_notebook_shows_the_page_in_a_frame(report):
    page = Page(report._repr_html_())
    (frame,) = page.all("iframe")
    assert frame["srcdoc"] == report.to_html()
    assert frame["sandbox"] == "allow-scripts"


def test_without_jinja2(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r'pip install "ao-core\[report\]"'):
        report.to_html()
    shown = report._repr_html_()
    assert shown.startswith("<pre>")
    assert "&lt;b&gt;K&lt;/b&gt;" in shown


def test_figure(report):
    figure = report.plot()
    assert type(figure) is Figure
    assert "matplotlib.pyplot" not in sys.modules
    quality, size = figure.axes
    assert [bar.get_height() for bar in quality.patches] == [21.5]
    assert [bar.get_height() for bar in size.patches] == [4e-3, 4e-3, 3.0, 6e-4, 6e-4, 0.5]
    assert [label.get_text() for label in size.get_xticklabels()] == [r.fqn for r in RECORDS[:3]]


def test_figure_can_be_written(report, tmp_path):
    report.plot().savefig(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    Report({}).plot().savefig(tmp_path / "empty.svg")
    assert (tmp_path / "empty.svg").stat().st_size > 1000


def test_figure_of_many_leaves_names_out():
    figure = Report({}, tuple(quantized(f"{i}.weight", 20.0) for i in range(100))).plot()
    assert len(figure.axes[0].patches) == 100
    assert "99.weight" not in [label.get_text() for label in figure.axes[1].get_xticklabels()]


def test_without_matplotlib(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r'pip install "ao-core\[report\]"'):
        report.plot()
