"""One linear layer: the contenders for a weight of its shape, and what was measured of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from ggml import ggml_linear
from ours import ours
from peers_linear import peers_linear
from reader import READER, reader, reader_of
from rotation import Contender, Maker, measured
from torch_linear import DENSE, torch_linear

from benchmarking import Paired, Row, Samples, paired, percentile

#: columns (in) and rows (out) of the weights
SHAPES = ((4096, 4096), (4096, 14336), (2048, 8192))
#: rows of activations -> rounds, which take about as long for each
ROUNDS = {1: 60, 4: 40, 16: 30, 64: 20, 256: 12}


@dataclass(frozen=True)
class Case:
    """Seconds of every contender for one shape and number of rows."""

    shape: tuple[int, int]
    rows: int
    contenders: dict[str, Contender]
    samples: Samples
    #: contender -> what reads its copies, where that was measured
    readers: Mapping[str, Contender] = field(default_factory=dict)

    def p10(self, name: str) -> float:
        """The 10th percentile of the seconds of a contender."""
        return percentile(self.samples[name], 10)

    def times(self, name: str, baseline: str) -> Paired:
        """How many times as fast as another a contender is."""
        return paired(self.samples, name, baseline)

    def share(self, name: str) -> Paired:
        """The part of the read rate at which a contender reads its weight.

        Of the rate at which the same copies are read, where that was measured; or else long pieces.
        """
        reading = self.readers.get(name, self.contenders[READER])
        part = self.contenders[name].nbytes / reading.nbytes
        return self.times(name, reading.name).scaled(part)


def makers(llama: str) -> dict[str, Maker]:
    """Everything that can be timed here: name -> what makes it for a weight.

    Args:
        llama: a folder with llama.cpp's libraries, or "".
    """
    ggml = ggml_linear(Path(llama)) if llama else {}
    return {**torch_linear(), **peers_linear(), **ggml, **ours()}


def contenders(shape: tuple[int, int], chosen: Iterable[Maker]) -> dict[str, Contender]:
    """The contenders for a normal weight (N, K), and the reader."""
    k, n = shape
    weight = torch.randn(n, k) / math.sqrt(k)
    found = [reader(), *(make(weight) for make in chosen)]
    return {contender.name: contender for contender in found}


def cases(
    chosen: Iterable[Maker], shapes: Iterable[tuple[int, int]], rounds: dict[int, int]
) -> Iterable[Case]:
    """Measure all contenders for each shape and number of rows (with so many rounds)."""
    chosen = list(chosen)
    for shape in shapes:
        rivals = contenders(shape, chosen)
        for m, count in rounds.items():
            # more rows are bound by arithmetic
            read = [one for one in rivals.values() if m == 1 and one.memory]
            readers = {one.name: reader_of(one) for one in read}
            samples = measured([*rivals.values(), *readers.values()], m, count)
            yield Case(shape, m, rivals, samples, readers)


def rows_of(case: Case) -> list[Row]:
    """A row for each contender."""
    return [
        {
            "K × N": "×".join(map(str, case.shape)),
            "M": case.rows,
            "contender": name,
            "kernel": case.contenders[name].kernel,
            "MiB": case.contenders[name].nbytes / 2**20,
            "µs": median(seconds) * 1e6,
            "p10": case.p10(name) * 1e6,
            "GB/s": case.contenders[name].nbytes / case.p10(name) / 1e9,
            "share of read": case.share(name).median,
            "share of read, 95 %": case.share(name).interval(),
            "× F.linear": times.median if times else "",
            "× F.linear, 95 %": times.interval() if times else "",
        }
        for name, seconds in case.samples.items()
        if name in case.contenders
        for times in [_times_dense(case, name)]
    ]


def _times_dense(case: Case, name: str) -> Paired | None:
    dense = DENSE.get(case.contenders[name].dtype, DENSE[torch.bfloat16])
    if name == READER or dense not in case.samples:
        return None
    return case.times(name, dense)
