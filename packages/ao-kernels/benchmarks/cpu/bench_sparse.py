"""Linear layers with sparse weights, blocks and two of every four values, beside the dense matmul."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
import bars
from rotation import ROTATED, measured
from sparse import Sparse, kinds, limit, sparse_linear
from torch_linear import dense

from benchmarking import Row, arguments, paired, percentile, record

TEXT = """\
`F.linear` of (M, {k}), bfloat16, with a weight ({n}, {k}) in {threads} threads. Contenders take turns in
shuffled rounds of one process, each on copies of its weight that exceed {rotated} MiB together, after a
call that is not timed; blocks that are stored stand at random places, values are normal. *× dense*: how
many times as fast as `F.linear` with a dense bfloat16 weight, the median of the ratios within rounds;
*95 %*: its interval, a bootstrap of rounds, of which the lower end must reach a bar; *limit*: what it
would be if time followed the multiplications that are left (M > 16), or the bytes of codes and places that
have to be read."""
#: rows of activations -> rounds
ROUNDS = {1: 40, 16: 30, 256: 12}


def rows_of(shape: tuple[int, int], m: int, rounds: int, most: int) -> list[Row]:
    """A row for each kind of weight, and the dense one."""
    chosen: dict[str, Sparse] = {kind.name: kind for kind in kinds(m)}
    weight = torch.randn(shape) / math.sqrt(shape[1])
    contenders = [dense(weight, dtype=torch.bfloat16, name=bars.F_LINEAR)]
    del weight
    contenders += [sparse_linear(shape, kind, m, most) for kind in chosen.values()]
    samples = measured(contenders, m, rounds)
    wanted = {bar.ours: bar for bar in bars.SPARSE if bar.rows == m}
    found = []
    for each in contenders:
        name, seconds, bar = each.name, samples[each.name], wanted.get(each.name)
        ratio = paired(samples, name, bars.F_LINEAR)
        found.append(
            {
                "M": m,
                "weight": name,
                "kernel": each.kernel,
                "MiB": each.nbytes / 2**20,
                "p10 ms": 1e3 * percentile(seconds, 10),
                "median ms": 1e3 * percentile(seconds, 50),
                "× dense": ratio.median,
                "95 %": ratio.interval(),
                "limit": limit(chosen[name], m) if name in chosen else 1.0,
                "bar": "" if bar is None else bar.bar,
                "verdict": "" if bar is None else bars.judged(ratio.low, bar.bar),
            }
        )
    return found


def main() -> None:
    rows_there = ",".join(map(str, ROUNDS))
    args = arguments(__doc__, n=4096, k=16384, threads=2, percent=100, copies=1000, m=rows_there)
    torch.set_num_threads(args.threads)
    rows: list[Row] = []
    with torch.inference_mode():
        for m in map(int, args.m.split(",")):
            rounds = max(1, ROUNDS.get(m, 12) * args.percent // 100)
            rows += rows_of((args.n, args.k), m, rounds, args.copies)
    text = TEXT.format(n=args.n, k=args.k, threads=args.threads, rotated=ROTATED >> 20)
    record(args.json, "Sparse weights on the CPU", text, rows)


if __name__ == "__main__":
    main()
