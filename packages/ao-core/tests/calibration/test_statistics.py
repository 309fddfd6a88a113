"""Statistics: against direct formulas in float64, and the same however rows are divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ao_core.calibration.statistics import (
    ABS_MAX,
    HESSIAN,
    RANGE,
    SQUARES,
    SUMS,
    Statistic,
    Statistics,
    merged,
    sampled_rows,
    union,
)
from ao_core.errors import ConfigError
from ao_core.testing.programs import run_ranks

ALL = (HESSIAN, SUMS, SQUARES, ABS_MAX, RANGE, sampled_rows(5))


def rows(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 7, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_formulas(dtype: torch.dtype) -> None:
    x = rows(33, dtype)
    found = Statistics(ALL).add(x.reshape(3, 11, 7)[:2]).add(x[22:])
    wide = x.double()
    close = {"rtol": 1e-12 if dtype == torch.float64 else 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found["hessian"], wide.T @ wide, **close)
    torch.testing.assert_close(found["squares"], (wide**2).sum(0), **close)
    assert torch.equal(found["sums"], wide[:22].sum(0) + wide[22:].sum(0))
    assert torch.equal(found["abs_max"].double(), wide.abs().amax(0))
    assert torch.equal(found["min"].double(), wide.amin(0))
    assert torch.equal(found["max"].double(), wide.amax(0))
    assert found.rows == 33
    assert found["hessian"].dtype == found["sums"].dtype == torch.float64
    assert found["sample"].dtype == dtype
    assert found.nbytes == sum(value.nbytes for value in found.values.values())


def test_any_division_of_the_rows_gives_the_same() -> None:
    x = rows(40).round()  # integers, whose sums are exact
    whole = Statistics(ALL).add(x)
    for sizes in ([1] * 40, [13, 27], [0, 39, 1, 0]):
        parts = x.split(sizes)
        one_by_one = Statistics(ALL)
        for part in parts:
            one_by_one = one_by_one.add(part)
        for key, value in whole.values.items():
            assert torch.equal(one_by_one[key], value), key
        together = merged([Statistics(ALL).add(part) for part in parts])
        for key in ("hessian", "sums", "squares", "abs_max", "min", "max"):
            assert torch.equal(together[key], whole[key]), key
        assert together.rows == one_by_one.rows == 40


def test_numbers_of_rows_change_the_sample_and_no_generator_is_touched() -> None:
    x, before = rows(1000), torch.get_rng_state()
    samples = [Statistics((sampled_rows(50, seed),)).add(x)["sample"] for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])
    places = [(x == row).all(1).nonzero().item() for row in samples[0]]
    assert len(set(places)) == 50  # without replacement
    assert 350 < sum(places) / 50 < 650  # a mean of 500 with a standard error of 41
    few = Statistics((sampled_rows(50),)).add(x[:3])
    assert len(few["sample"]) == 3


def test_saved_and_restored_halfway(tmp_path: Path) -> None:
    x = rows(40)
    straight = Statistics(ALL).add(x[:17]).add(x[17:])
    torch.save(Statistics(ALL).add(x[:17]).state_dict(), tmp_path / "half.pt")
    again = Statistics.restored(ALL, torch.load(tmp_path / "half.pt", weights_only=True))
    again = again.add(x[17:])
    assert again.rows == straight.rows
    for key, value in straight.values.items():
        assert torch.equal(again[key], value), key
    empty = Statistics.restored(ALL, Statistics(ALL).state_dict())
    assert empty.rows == 0
    with pytest.raises(ConfigError, match=r"state has \['row_count', 'sums'\].*hessian"):
        Statistics.restored((HESSIAN,), Statistics((SUMS,)).add(x).state_dict())


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"\['hessian'\] cannot be merged .* \['sums'\]"):
        Statistics((HESSIAN,)).merge(Statistics((SUMS,)))
    with pytest.raises(ConfigError, match="'hessian'.*there are sums"):
        Statistics((SUMS,)).add(rows(1))["hessian"]
    with pytest.raises(ConfigError, match="'sums'.*no row was seen"):
        Statistics((SUMS,))["sums"]
    with pytest.raises(ConfigError, match="count=0"):
        sampled_rows(0)
    other = Statistic("sums", ("sums",), SQUARES.of, SQUARES.merge)
    assert union([(SUMS, HESSIAN), (SUMS,)]) == (SUMS, HESSIAN)
    with pytest.raises(ConfigError, match="'sums'"):
        union([(SUMS,), (other,)])


def test_two_ranks_agree_with_one_process(tmp_path: Path) -> None:
    output = run_ranks(Path(__file__).with_name("ranks_worker.py"), 2, tmp_path)
    assert "statistics: ok" in output, output


def test_rows_added_in_place_give_the_same_bits_and_half_of_a_hessian_is_mirrored() -> None:
    x = torch.randn(90, 1100)
    by_merging = Statistics((HESSIAN, SUMS))
    for rows in x.split(40):
        by_merging = by_merging.add(rows)
    kept = by_merging.add(x[:0]).state_dict()
    in_place = Statistics((HESSIAN, SUMS)).add(x[:40])
    memory = in_place["hessian"].data_ptr()
    for rows in x[40:].split(40):
        in_place = in_place.absorb(rows)
    assert in_place["hessian"].data_ptr() == memory
    found = in_place.finish()
    assert found.rows == 90
    assert torch.equal(found["hessian"], kept["hessian"])
    assert torch.equal(found["sums"], kept["sums"])
    exact = x.double().T @ x.double()
    torch.testing.assert_close(found["hessian"], exact, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(found["hessian"], found["hessian"].T, rtol=1e-6, atol=1e-4)
