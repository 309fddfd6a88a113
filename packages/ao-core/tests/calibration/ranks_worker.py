"""One rank of test_statistics.py: statistics merged over ranks are those of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ao_core.calibration.statistics import (
    ABS_MAX,
    HESSIAN,
    RANGE,
    SQUARES,
    SUMS,
    Statistics,
    merged_over_ranks,
    sampled_rows,
)
from ao_core.testing.programs import one_of_the_ranks

NEED = (HESSIAN, SUMS, SQUARES, ABS_MAX, RANGE)


def main(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 7, generator=generator)
    for data in (x, x.mul(8).round()):
        whole = Statistics(NEED).add(data)
        found = merged_over_ranks(Statistics(NEED).add(data[rank::2]))
        assert found.rows == whole.rows == 50
        for key, value in whole.values.items():
            exact = data is not x or key in ("abs_max", "min", "max")
            close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-6, "atol": 1e-5}
            torch.testing.assert_close(found[key], value, **close)
    wide = x.double()  # float64 products: nothing but the order of the sum differs
    found = merged_over_ranks(Statistics((HESSIAN,)).add(wide[rank::2]))
    torch.testing.assert_close(found["hessian"], wide.T @ wide, rtol=1e-12, atol=1e-12)
    # a rank without rows has nothing to add
    mine = Statistics(NEED) if rank else Statistics(NEED).add(x)
    assert torch.equal(merged_over_ranks(mine)["sums"], Statistics(NEED).add(x)["sums"])
    sample = merged_over_ranks(Statistics((sampled_rows(9, rank),)).add(x[rank::2]))
    assert sample.need[0].name == f"sampled_rows(9, {rank})"
    assert len({tuple(row.tolist()) for row in sample["sample"]}) == 9
    sys.stdout.write("statistics: ok\n")


if __name__ == "__main__":
    with one_of_the_ranks(Path(sys.argv[1])) as own_rank:
        main(own_rank)
