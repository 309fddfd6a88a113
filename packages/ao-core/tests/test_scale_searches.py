"""Searches for scales: better than absmax in their own measure, never worse, near the optimum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ao_core.dtypes import CODED_DTYPES
from ao_core.numerics import choose_qparams, dequantize_affine, grid_shape, quantize_affine
from ao_core.numerics.slabs import searched_at_once
from ao_core.scales import hqq_qparams, mse_qparams
from ao_core.scales.rows import GAIN
from ao_core.spec import WHOLE, Spec

DTYPES = {dtype.name: dtype for dtype in CODED_DTYPES}
METHODS = {"mse": (mse_qparams, 2.0), "hqq": (hqq_qparams, 0.7)}
every_method = pytest.mark.parametrize("method", METHODS)


def weights(kind: str, *shape: int, seed: int = 0) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "uniform":
            return torch.rand(*shape) * 2 - 1
        if kind == "student":
            return torch.distributions.StudentT(3.0).sample(shape)
        return torch.randn(*shape)


def errors(x, dtype, spec, qparams, p: float | None = None) -> torch.Tensor:
    """Of each row of blocks (1, g), in float64, one column a group: the sum of squared errors, or
    the measure of the search with exponent `p`, where errors along the weights count 1 + GAIN times.
    """
    approx = round_trip(x, dtype, spec.block, qparams).double()
    group = x.shape[1] if spec.block[1] == WHOLE else spec.block[1]
    found = []
    for w, q in zip(x.double().split(group, 1), approx.split(group, 1), strict=True):
        error = q - w
        square = error.square().sum(1)
        if p is not None:
            unit = torch.nn.functional.normalize(w, dim=1, eps=1e-300)
            amplified = square + GAIN * (error * unit).sum(1).square()
            share = torch.where(square == 0, 0.0, amplified / square)
            square = error.abs().pow(p).sum(1) * share.pow(p / 2)
        found.append(square)
    return torch.stack(found, 1)


def compare(method: str, x, dtype, spec, powers=(None,)):
    """For each power: (errors of absmax, errors of the method), group by group."""
    choose = METHODS[method][0]
    name = spec.scale_dtype
    before = choose_qparams(x, dtype, spec.block, spec.zero_point, name)
    after = choose(x, dtype, spec)
    for old, new in zip(before, after, strict=True):
        if old is None:
            assert new is None
            continue
        assert new.shape == old.shape
        assert new.dtype == old.dtype
    return [(errors(x, dtype, spec, before, q), errors(x, dtype, spec, after, q)) for q in powers]


@every_method
@pytest.mark.parametrize("kind", ["normal", "uniform", "student"])
@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("zero_point", ["none", "int"])
def test_better_than_absmax_for_every_group_size(method, kind, bits, zero_point):
    dtype = DTYPES[f"int{bits}" if zero_point == "none" else f"uint{bits}"]
    x = weights(kind, 8, 520)
    for group in (32, 64, 128, 256, WHOLE):
        spec = Spec(dtype.name, (1, group), "bfloat16", zero_point)
        pairs = compare(method, x, dtype, spec, (None, METHODS[method][1]))
        for old, new in pairs:
            assert (new <= old).all()
        gain = float(pairs[1][1].sum() / pairs[1][0].sum())
        # sixteen levels over 520 uniform numbers leave nearly nothing to gain, four over those that
        # have a few large ones nearly everything
        assert 0.08 < gain < 0.999, (group, gain)


@every_method
@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("zero_point", ["none", "int"])
def test_weights_keep_their_length(method, bits, zero_point):
    """The least squared error of 2 bits, with scales unbounded, loses a tenth of it."""
    dtype = DTYPES[f"int{bits}" if zero_point == "none" else f"uint{bits}"]
    x = weights("normal", 64, 256)
    spec = Spec(dtype.name, (1, 64), "bfloat16", zero_point)
    found = round_trip(x, dtype, spec.block, METHODS[method][0](x, dtype, spec))
    gain = float((found * x).sum() / x.square().sum())
    assert 0.95 < gain < 1.01


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_each_is_the_best_in_its_own_measure(bits):
    dtype = DTYPES[f"int{bits}"]
    x = weights("normal", 64, 256)
    spec = Spec(dtype.name, (1, 64), "bfloat16")
    ((_, square_mse), (_, power_mse)) = compare("mse", x, dtype, spec, (2.0, 0.7))
    ((_, square_hqq), (_, power_hqq)) = compare("hqq", x, dtype, spec, (2.0, 0.7))
    assert square_mse.sum() < square_hqq.sum()
    assert power_hqq.sum() < power_mse.sum()


@every_method
@pytest.mark.parametrize("name", ["int8", "uint8", "nf4", "f8e4m3", "f4e2m1", "ternary", "int1"])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "e8m0", "e4m3"])
def test_never_worse_in_either_measure(method, name, scale_dtype):
    dtype = DTYPES[name]
    x = weights("student", 6, 70)
    x[1] = 0.0
    x[2] = 0.37
    x[3, 5] = 3e4
    x[4] *= 1e-30
    x[5] = -x[5].abs()
    kinds = ("none", "int", "float") if dtype.kind == "int" else ("none", "float")
    for zero_point in kinds:
        spec = Spec(name, (1, 32), scale_dtype, zero_point)
        for old, new in compare(method, x, dtype, spec, (None, METHODS[method][1])):
            assert (new <= old * (1 + 1e-12)).all()
            assert (new[1] == 0).all()


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["int4", "uint3", "int2"]),
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    st.lists(st.sampled_from([WHOLE, 1, 2, 4, 5]), min_size=1, max_size=3).map(tuple),
    st.sampled_from(list(METHODS)),
    st.integers(0, 100),
)
def test_any_shape_and_block_is_what_its_blocks_are_alone(name, shape, block, method, seed):
    """Ragged, empty and n-dimensional tensors; a permuted tensor gives the same."""
    dtype, choose = DTYPES[name], METHODS[method][0]
    zero_point = "int" if dtype.min == 0 else "none"
    spec = Spec(name, block, "float32", zero_point)
    x = weights("normal", *shape, seed=seed)
    scale, point = choose(x, dtype, spec)
    assert scale.shape == grid_shape(shape, block)
    strided = x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    again, again_point = choose(strided, dtype, spec)
    assert torch.equal(scale, again)
    assert point is None or torch.equal(point, again_point)
    if x.numel() == 0:
        return
    # the last block, cut out and searched for alone
    extents = [
        size if b == WHOLE else min(b, size)
        for size, b in zip(shape, ((1,) * 3 + block)[-len(shape) :], strict=True)
    ]
    last = x[
        tuple(slice((size - 1) // e * e, None) for size, e in zip(shape, extents, strict=True))
    ]
    alone = choose(last, dtype, spec)
    corner = (slice(-1, None),) * len(shape)
    found = (scale[corner], None if point is None else point[corner])
    first, second = (last - round_trip(last, dtype, block, q) for q in (alone, found))
    torch.testing.assert_close(first.norm(), second.norm(), rtol=1e-4, atol=1e-6)


def round_trip(x, dtype, block, qparams):
    codes = quantize_affine(x, dtype, block, *qparams)
    return dequantize_affine(codes, dtype, block, *qparams)


@pytest.mark.parametrize("name", ["int4", "int3", "int2"])
def test_near_the_optimum_of_an_exhaustive_search(name):
    """Every scale on a fine grid, to a fortieth of the range, that is not worse than absmax in squares."""
    dtype = DTYPES[name]
    x = weights("normal", 40, 32)
    spec = Spec(name, (1, WHOLE))
    (limit, _), (_, found) = compare("mse", x, dtype, spec, (None, 2.0))
    best = torch.full((40, 1), torch.inf, dtype=torch.float64)
    top = x.abs().amax(1, keepdim=True) / dtype.quant_max
    factors = torch.linspace(0.025, 1.25, 2000)
    for factor in torch.cat([factors, -factors]).tolist():
        plain, new = (errors(x, dtype, spec, (top * factor, None), p) for p in (None, 2.0))
        best = torch.where(plain <= limit, torch.minimum(best, new), best)
    assert float(found.sum()) <= 1.06 * float(best.sum())
    assert (found >= 0.97 * best).all()  # what a fit finds may lie between two factors


@every_method
def test_the_same_twice_and_in_pieces(method):
    """Deterministic; and what a row gets does not depend on the others."""
    dtype, choose = DTYPES["uint4"], METHODS[method][0]
    spec = Spec("uint4", (1, 128), "bfloat16", "int")
    rows = 2 * searched_at_once(torch.device("cpu")) // 1000 + 3
    x = weights("normal", rows, 1000)
    scale, point = choose(x, dtype, spec)
    again, again_point = choose(x, dtype, spec)
    assert torch.equal(scale, again)
    assert torch.equal(point, again_point)
    some, some_point = choose(x[-5:], dtype, spec)
    assert torch.equal(scale[-5:], some)
    assert torch.equal(point[-5:], some_point)


@every_method
@pytest.mark.parametrize("unit", [2.0**-20, 2.0**20])
def test_the_unit_of_the_weights_does_not_matter(method, unit):
    dtype, choose = DTYPES["int3"], METHODS[method][0]
    x = weights("student", 8, 96)
    spec = Spec("int3", (1, 32))
    assert torch.equal(choose(x, dtype, spec)[0] * unit, choose(x * unit, dtype, spec)[0])


@every_method
def test_bfloat16_is_read_as_the_numbers_it_stands_for(method):
    dtype, choose = DTYPES["uint3"], METHODS[method][0]
    spec = Spec("uint3", (1, 32), "bfloat16", "int")
    x = weights("normal", 9, 70).bfloat16()
    narrow, wide = choose(x, dtype, spec), choose(x.float(), dtype, spec)
    assert torch.equal(narrow[0], wide[0])
    assert torch.equal(narrow[1], wide[1])


@every_method
def test_blocks_that_are_not_finite_stay_as_absmax_has_them(method):
    dtype, choose = DTYPES["int4"], METHODS[method][0]
    x = weights("normal", 3, 64)
    x[0, 3], x[1, 3] = torch.nan, torch.inf
    spec = Spec("int4", (1, WHOLE))
    expected, _ = choose_qparams(x, dtype, spec.block)
    scale, _ = choose(x, dtype, spec)
    assert torch.equal(scale[:2].nan_to_num(-1.0), expected[:2].nan_to_num(-1.0))
    assert scale[2] != expected[2]


class Largest(TorchDispatchMode):
    """The most bytes that one operation has written, apart from views of `x`."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.nbytes, self.known = 0, x.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() != self.known
            ):
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return result


@every_method
@pytest.mark.parametrize("block", [(1, 64), (128, 128), (1, WHOLE), (WHOLE, WHOLE)])
def test_memory_is_bounded_by_a_piece(method, block):
    dtype, choose = DTYPES["int2"], METHODS[method][0]
    x = weights("normal", 400, 1100).bfloat16()
    piece = 8 * searched_at_once(torch.device("cpu"))  # errors are compared in float64
    with Largest(x) as largest:
        choose(x, dtype, Spec("int2", block, "bfloat16"))
    assert piece / 16 < largest.nbytes <= piece < 4 * x.numel()
