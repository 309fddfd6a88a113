"""The bars that the CPU kernels have to clear: ratios between contenders of one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from linear import Case
from ours import DTYPES, FORMATS, name_of
from quantizers import BY_PROGRAM
from reader import READER
from torch_linear import DENSE

from benchmarking import Paired, Row, Samples, paired


@dataclass(frozen=True)
class Bar:
    """At least `bar` times as fast as another contender; `aim` is what the design hopes for."""

    ours: str
    peer: str
    bar: float
    aim: float | None
    #: rows of activations, of a linear layer
    rows: int = 1


def _bars(ours: str, peer: str, *bars: tuple[int, float, float | None]) -> list[Bar]:
    return [Bar(ours, peer, bar, aim, rows) for rows, bar, aim in bars]


def _by_programs(bar: Bar) -> Bar:
    """The same bar for compiled programs, beside the peer's where it has one."""
    peer = bar.peer if bar.peer.startswith("llama.cpp") else bar.peer + BY_PROGRAM
    return replace(bar, ours=bar.ours + BY_PROGRAM, peer=peer)


_INT4PACK, F_LINEAR = "torch int4pack g128, bf16", "F.linear bf16"
_INT8PACK = "torch int8pack, bf16"
_DECODER = "torch bf16"
#: of a layer of 4096 × 4096
LINEAR = [
    *_bars(name_of("int4 g128"), _INT4PACK, (1, 1.2, 1.35), (16, 1.9, 3), (64, 2, None), (256, 2.2, None)),
    *_bars(name_of("int4 g128 dynamic"), _INT4PACK, (64, 4, 5), (256, 4.4, 5)),
    # llama.cpp quantizes activations, too: for one row there is no need to
    *_bars(name_of("int4 g32"), "llama.cpp Q4_0, fp32", (1, 1.05, 1.15)),
    *_bars(name_of("int4 g32 dynamic"), "llama.cpp Q4_0, fp32", (16, 1.6, 2.2), (256, 2.5, 3)),
    *_bars(name_of("int4 g128"), F_LINEAR, (1, 5, 6), (64, 1.1, 1.5), (256, 0.95, 1)),
    *_bars(name_of("int4 g128 dynamic"), F_LINEAR, (64, 2.2, 2.6), (256, 1.7, 2)),
    *_bars(name_of("int8"), _INT8PACK, (1, 1.4, 1.6), (16, 1.8, 3), (64, 1.5, 2.5), (256, 2.4, 2.6)),
    *_bars("ao int8 dynamic, fp32", "quantize_dynamic x86, fp32", (1, 1.1, 1.3), (16, 1, 1.2), (256, 1, 1.1)),
    *_bars("ao int4 g32, fp32", "torch int4pack g32, fp32", (1, 100, None), (16, 100, None)),
]  # fmt: skip
_DECODE = [
    Bar("ao int4 g32", "llama.cpp Q4_0", 1.05, 1.25),
    Bar("ao int4 g32", "torchao int4 g32", 1.55, 1.9),
    Bar("ao int8", "llama.cpp Q8_0", 1.1, 1.3),
    Bar("ao int8", _DECODER, 3.3, 4),
]
#: in eager mode, and by compiled programs, beside whichever of the peer's is compiled, too
DECODE = [*_DECODE, *map(_by_programs, _DECODE)]
PREFILL = [
    Bar("ao int4 g32 dynamic", "llama.cpp Q4_0", 2, 2.6),
    Bar("ao int8 dynamic", "quantize_dynamic x86", 1, 1.1),
    Bar("ao int4 g32", _DECODER, 1, 1.1),
]
#: of a layer of 4096 × 16384 with sparse weights; a bar of 1 is where they break even
SPARSE = [
    Bar("bsr 64×64 40% bf16", F_LINEAR, 1, 1.5, 256),
    Bar("bsr 64×64 80% bf16", F_LINEAR, 3, 4.5, 256),
    Bar("bsr 64×64 90% bf16", F_LINEAR, 6, 8.5, 256),
]
#: share of the read rate of every format at one row
SHARE = (0.85, 0.95)
#: of every format at any number of rows, beside the dense matmul of the same dtype
NEVER_SLOWER = (0.95, 1.0)
#: greatest seconds of `quantize_` to int4 g32, and greatest peak over the model
SECONDS, PEAK = 1.5, 1.1


def judged(measured: float, bar: float, *, most: bool = False) -> str:
    """Whether a bar is met."""
    return "met" if (measured <= bar if most else measured >= bar) else "missed"


def verdict(case: str, bar: float, aim: float | None, times: Paired | None) -> Row:
    """A line of the table: a bar is met where the whole interval reaches it."""
    return _line(
        case,
        bar,
        aim,
        "" if times is None else times.median,
        "" if times is None else times.interval(),
        "not measured" if times is None else judged(times.low, bar),
    )


def at_most(case: str, bar: float, measured: float) -> Row:
    """A line of the table for what must not be greater than its bar."""
    return _line(case, f"≤ {bar}", None, measured, "", judged(measured, bar, most=True))


def _line(
    case: str,
    bar: float | str,
    aim: float | None,
    measured: float | str,
    interval: str,
    verdict: str,
) -> Row:
    return {
        "case": case,
        "bar": bar,
        "aim": "" if aim is None else aim,
        "measured": measured,
        "95 %": interval,
        "verdict": verdict,
    }


def compared(bars: Iterable[Bar], samples: Samples, what: str) -> list[Row]:
    """A line for each bar, from samples that hold its two contenders, if they were there."""
    lines = []
    for bar in bars:
        there = {bar.ours, bar.peer} <= set(samples)
        times = paired(samples, bar.ours, bar.peer) if there else None
        lines.append(verdict(f"{what}: {bar.ours} × {bar.peer}", bar.bar, bar.aim, times))
    return lines


def shares(case: Case) -> list[Row]:
    """A line for each weight format at one row."""
    return [
        verdict(f"M = 1: {name_of(fmt)}, share of {READER}", *SHARE, case.share(name_of(fmt)))
        for fmt in FORMATS
    ]


def never_slower(case: Case) -> list[Row]:
    """For each dtype, the format that gains least over the dense matmul."""
    lines = []
    for dtype, (short, formats) in DTYPES.items():
        gains = {name_of(f, dtype): case.times(name_of(f, dtype), DENSE[dtype]) for f in formats}
        worst = min(gains, key=lambda name: gains[name].low)
        what = f"M = {case.rows}, {short}: slowest format ({worst}) × {DENSE[dtype]}"
        lines.append(verdict(what, *NEVER_SLOWER, gains[worst]))
    return lines


def linear_rows(cases: Mapping[int, Case]) -> list[Row]:
    """All lines of linear layers, from the case of each number of rows."""
    lines = shares(cases[1])
    for bar in LINEAR:
        lines += compared([bar], cases[bar.rows].samples, f"M = {bar.rows}")
    return lines + [line for case in cases.values() for line in never_slower(case)]
