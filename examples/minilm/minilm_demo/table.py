"""The tables in the terminal, and the text of their cells, which the page shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from minilm_demo.results import Result
from minilm_demo.variants import BF16, FP32

SIZE_AND_QUALITY = (
    "disk MB", "memory MB", "weight dB", "output dB", "cosine mean", "cosine min", "top-1", "as fp32",
)  # fmt: skip
TIMES = ("fp32 ms", "× fp32", "bf16 ms", "× bf16")


def sizes(results: Sequence[Result]) -> Table:
    """Size and quality, one row a variant."""
    found = _table("Size and quality", SIZE_AND_QUALITY)
    for result in results:
        found.add_row(result.name, *size_cells(result))
    return found


def speeds(results: Sequence[Result], workload: str) -> Table:
    """Latency, one row a variant."""
    found = _table(f"Latency of {workload}", TIMES)
    for result in results:
        found.add_row(result.name, *time_cells(result, workload))
    return found


def _table(title: str, headers: Sequence[str]) -> Table:
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column("recipe", overflow="fold")
    for header in headers:
        found.add_column(header.replace(" ", "\n"), justify="right", no_wrap=True)
    return found


def size_cells(result: Result) -> list[str]:
    """What `SIZE_AND_QUALITY` names, as text."""
    quality = result.quality
    return [
        f"{result.disk_bytes / 1e6:.1f}",
        f"{result.memory_bytes / 1e6:.1f}",
        decibel(result.weight_sqnr_db),
        decibel(quality.output_sqnr_db),
        f"{quality.cosine_mean:.4f}",
        f"{quality.cosine_min:.4f}",
        f"{quality.accuracy:.3f}",
        f"{quality.agreement:.3f}",
    ]


def time_cells(result: Result, workload: str) -> list[str]:
    """What `TIMES` names, as text."""
    found = []
    for dtype in (FP32, BF16):
        latency = result.latency[workload].get(dtype)
        if latency is None:
            found += ["–", "–"]
        else:
            found += [f"{latency.median_ms:.1f}", f"{latency.speedup[dtype]:.2f}"]
    return found


def decibel(value: float | None) -> str:
    """One decimal; nothing where there is no figure."""
    if value is None:
        return "–"
    return "∞" if math.isinf(value) else f"{value:.1f}"


def notes(results: Sequence[Result], about: dict[str, Any]) -> list[str]:
    """What the columns mean, in sentences."""
    texts, error = 2 * about["pairs"], 100 * standard_error(results[0], about["pairs"])
    quality = (
        "weight dB: SQNR, median over the quantized weights. "
        f"output dB and cosine: the vectors of all {texts} texts beside those of fp32."
    )
    retrieval = (
        f"top-1: share of {about['pairs']} first sentences that find their own docstring; its "
        f"standard error is about {error:.1f} points. as fp32: share that finds the same one as the "
        f"original does. Sentences are cut at {about['query_tokens']} tokens, docstrings at "
        f"{about['document_tokens']}."
    )
    found = [
        "disk: the files of save_model. memory: all parameters and buffers.",
        quality,
        retrieval,
    ]
    for workload in results[0].latency:
        rounds = next(iter(results[0].latency[workload].values())).rounds
        found.append(
            f"{workload}: median of {rounds} alternate rounds on {about['threads']} threads, with "
            "activations in fp32 or bf16; ×: times as fast as the dense model in that dtype, "
            "median over the rounds."
        )
    return found


def standard_error(result: Result, count: int) -> float:
    """Of a share among `count` independent questions."""
    share = result.quality.accuracy
    return math.sqrt(share * (1 - share) / count)
