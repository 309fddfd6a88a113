"""The plots of the report, as SVG text."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minilm_demo.results import Result
from minilm_demo.variants import BF16, FP32

#: part of the model -> pattern of its parameters' names, the first that is found counts
_PARTS = {
    "word embeddings": r"word_embeddings",
    "attention": r"attention",
    "feed-forward": r"intermediate|\d\.output",
    "other": r"",
}


def sqnr_by_layer(results: Sequence[Result]) -> str:
    """A map of the SQNR of each weight in each variant; grey where it was not quantized."""
    rows = [result for result in results if result.layers]
    names = list(dict.fromkeys(w.fqn for r in rows for w in r.layers if w.sqnr_db is not None))
    found = [{layer.fqn: layer.sqnr_db for layer in row.layers} for row in rows]
    values = np.array([[d.get(n) for n in names] for d in found], dtype=float)  # None: NaN
    figure, axes = _figure(11, 1.9 + 0.24 * len(rows))
    axes.set_facecolor("#ddd")
    image = axes.imshow(values, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set_xticks(range(len(names)), [_short(name) for name in names], rotation=90, fontsize=6)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7)
    figure.colorbar(image, ax=axes, label="weight SQNR, dB", pad=0.01)
    return _svg(figure)


def bytes_by_part(results: Sequence[Result]) -> str:
    """Bars of the memory that each variant takes, by part of the model."""
    dense = {layer.fqn: layer.bytes_before for r in results for layer in r.layers}
    figure, axes = _figure(9, 0.9 + 0.24 * len(results))
    left = np.zeros(len(results))
    for part, color in zip(_PARTS, ("#4477aa", "#66ccee", "#228833", "#bbbbbb"), strict=True):
        sizes = np.array([_part_bytes(result, dense)[part] / 1e6 for result in results])
        axes.barh(range(len(results)), sizes, left=left, color=color, label=part)
        left += sizes
    axes.set_yticks(range(len(results)), [result.name for result in results], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("memory, MB")
    axes.legend(fontsize=7, frameon=False)
    return _svg(figure)


def quality_by_size(results: Sequence[Result]) -> str:
    """Output SQNR over size on disk, one numbered point a variant."""
    figure, axes = _figure(8, 4.5)
    for number, result in enumerate(results):
        quality = result.quality.output_sqnr_db
        if np.isfinite(quality):
            axes.plot(result.disk_bytes / 1e6, quality, "o", color="#4477aa", markersize=4)
            where = (result.disk_bytes / 1e6, quality)
            axes.annotate(str(number), where, xytext=(4, 2), textcoords="offset points", fontsize=7)
    axes.set_xlabel("files of save_model, MB (log scale); numbers are rows of the table")
    axes.set_ylabel("output SQNR, dB")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.grid(alpha=0.3)
    return _svg(figure)


def speed(results: Sequence[Result]) -> str:
    """Speed of each variant beside the dense model in the same dtype."""
    rows = [result for result in results if result.name not in (FP32, BF16)]
    workloads = list(rows[0].latency)
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(rows)), layout="constrained")
    for column, workload in enumerate(workloads):
        axes = figure.add_subplot(1, len(workloads), column + 1)
        for dtype, marker, color in ((FP32, "o", "#4477aa"), (BF16, "s", "#ee6677")):
            speeds = [row.latency[workload][dtype].speedup[dtype] for row in rows]
            label = f"activations in {dtype}, beside {dtype}"
            axes.plot(speeds, range(len(rows)), marker, color=color, markersize=4, label=label)
        axes.axvline(1, color="#888", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [row.name for row in rows] if not column else [])
        axes.tick_params(labelsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.grid(alpha=0.3, axis="x")
        axes.set_title(workload, fontsize=9)
    figure.supxlabel("times as fast (right of the line: faster)", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    return _svg(figure)


def _part_bytes(result: Result, dense: dict[str, int]) -> dict[str, float]:
    """Bytes of a variant by part; a model without a report holds all in one dense dtype."""
    sizes = dict.fromkeys(_PARTS, 0.0)
    after = {layer.fqn: layer.bytes_after for layer in result.layers}
    scale = 0.5 if result.name == BF16 else 1.0
    for fqn, size in dense.items():
        part = next(part for part, pattern in _PARTS.items() if re.search(pattern, fqn))
        sizes[part] += after.get(fqn, size * scale)
    sizes["other"] += result.memory_bytes - sum(sizes.values())
    return sizes


def _short(fqn: str) -> str:
    """The name of a weight without what all names have."""
    for text in ("encoder.layer.", ".weight", ".self", ".dense", "embeddings."):
        fqn = fqn.replace(text, "")
    return fqn


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure) -> str:
    """The figure as an SVG element, text as text."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minilm"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()[file.getvalue().index("<svg") :]
