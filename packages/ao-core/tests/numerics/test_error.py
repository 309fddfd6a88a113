"""Error measures against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ao_core.errors import ConfigError
from ao_core.numerics import cosine, relative_error, sqnr


@pytest.mark.parametrize("n", [1, 100, (1 << 16) + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_numpy(n: int, dtype: torch.dtype):
    a = torch.randn(n).to(dtype)
    b = a + 0.01 * torch.randn(n).to(dtype)
    x, y = a.double().numpy(), b.double().numpy()
    noise, signal = np.linalg.norm(x - y), np.linalg.norm(x)
    if noise:
        assert sqnr(a, b).item() == pytest.approx(20 * math.log10(signal / noise), abs=1e-9)
    assert relative_error(a, b).item() == pytest.approx(noise / signal, rel=1e-12)
    assert cosine(a, b).item() == pytest.approx(x @ y / signal / np.linalg.norm(y), rel=1e-12)


def test_known_values():
    ref = torch.tensor([3.0, 4.0])
    assert sqnr(ref, ref * 0.9).item() == pytest.approx(20, abs=1e-5)
    assert sqnr(ref, 2 * ref).item() == 0
    assert relative_error(ref, -ref).item() == 2
    assert cosine(ref, torch.tensor([-4.0, 3.0])).item() == 0
    assert cosine(ref, -ref).item() == -1


def test_equal_and_zero_tensors():
    zero_point, one = torch.zeros(3), torch.ones(3)
    for same in (zero_point, one, torch.empty(0)):
        assert sqnr(same, same).item() == math.inf
        assert relative_error(same, same).item() == 0
        assert cosine(same, same).item() == pytest.approx(1)
    assert sqnr(zero_point, one).item() == -math.inf
    assert relative_error(zero_point, one).item() == math.inf
    assert relative_error(one, zero_point).item() == 1
    assert cosine(zero_point, one).item() == 0


def test_extremes_do_not_overflow_or_underflow():
    for scale in (1e38, 1e-38):
        ref = torch.tensor([1.0, 2.0]) * scale
        assert sqnr(ref, ref * 0.5).item() == pytest.approx(20 * math.log10(2), abs=1e-5)


def test_nan_shows():
    bad = torch.tensor([1.0, math.nan])
    assert sqnr(bad, bad).isnan()
    assert cosine(bad, bad).isnan()


def test_shapes_must_agree():
    with pytest.raises(ConfigError, match=r"approx has shape \(3, 1\)"):
        sqnr(torch.ones(3), torch.ones(3, 1))
