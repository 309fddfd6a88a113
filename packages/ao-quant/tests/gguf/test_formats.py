"""The block formats of GGUF against the `gguf` package: values, bytes, and what it cannot encode."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import nn

import ao_core
from ao_core import QTensor, quantize_tensor
from ao_core.ext import CheckpointError
from ao_core.ext.numerics import sqnr
from ao_core.testing import DTypeSuite, TransformSuite
from ao_quant import GGUFWeightOnlyConfig, MXWeightOnlyConfig
from ao_quant.configs import FILE_TYPES, GGUF_TYPES
from ao_quant.gguf.blocks import block_size, from_blocks, kind_of, to_blocks
from ao_quant.gguf.encode import encode

#: those that the package can encode
THEIRS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
OURS = tuple(kind for kind in GGUF_TYPES if kind not in THEIRS)

# nested scales and offset zero points are among the formats that every layout is tried with in ao-core
for _kind in GGUF_TYPES:
    _fields = {"config": GGUFWeightOnlyConfig(_kind)}
    globals()[f"Test_{_kind}"] = type(f"Test_{_kind}", (TransformSuite,), _fields)


class TestIQ4NL(DTypeSuite):
    dtype = "iq4_nl"


def _spec(kind, shape=(1, 1)):
    return GGUFWeightOnlyConfig(kind).spec(shape, torch.float32)


def _type(kind):
    return gguf.GGMLQuantizationType[kind.upper()]


def _encoded(x, kind):
    return encode(kind, x, _spec(kind, tuple(x.shape)))


def _gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=GGUF_TYPES)
def kind(request):
    return request.param


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_random_bytes_decode_as_the_package_decodes_them(kind):
    elements, size = block_size(kind)
    assert (elements, size) == gguf.GGML_QUANT_SIZES[_type(kind)]
    raw = np.random.default_rng(7).integers(0, 256, (3, 41, 5 * size), dtype=np.uint8)
    if kind == "mxfp4":
        raw[..., ::size] %= 255
    with np.errstate(all="ignore"):  # scales that are infinite, or no numbers
        expected = gguf.dequantize(raw, _type(kind))
    q = from_blocks(torch.from_numpy(raw), kind)
    assert q.shape == expected.shape == (3, 41, 5 * elements)
    actual = q.dequantize().numpy()
    nan = np.isnan(expected)
    assert (0 < nan.mean() < 0.1) or kind == "mxfp4"
    assert np.array_equal(np.isnan(actual), nan)
    bits = np.float32 if kind == "mxfp4" else np.int32  # whose -0 is 0 for the package
    assert np.array_equal(actual.view(bits)[~nan], expected.view(bits)[~nan])
    assert np.array_equal(to_blocks(q, kind).numpy(), raw)


def test_bytes_a_weight(kind):
    elements, size = block_size(kind)
    q = _encoded(_gaussian(6, 512), kind)
    assert q.stored_bytes == 6 * 512 // elements * size


def test_an_exponent_of_mxfp4_that_only_ggml_has():
    """255 is 2**128 for ggml, and no number of the standard: it is not read as one."""
    raw = torch.zeros(2, 17, dtype=torch.uint8)
    raw[1, 0] = 255
    with pytest.raises(CheckpointError, match=r"2\*\*128"):
        from_blocks(raw, "mxfp4")


def test_what_is_quantized_to_mxfp4_are_blocks_of_ggml():
    """The package rounds to an exponent of its own; what it reads of ours is what ours are."""
    q = quantize_tensor(_gaussian(6, 512), MXWeightOnlyConfig().spec((6, 512), torch.float32))
    assert kind_of(q) == "mxfp4"
    data = to_blocks(q, "mxfp4")
    assert np.array_equal(gguf.dequantize(data.numpy(), _type("mxfp4")), q.dequantize().numpy())


def test_the_type_of_a_tensor(kind):
    for shape in ((512,), (6, 512), (3, 2, 512)):
        assert kind_of(_encoded(torch.zeros(shape), kind)) == kind
    assert kind_of(quantize_tensor(torch.zeros(6, 512), _spec(kind))) == kind


# -- encoding as the package does ------------------------------------------------------------------


def _inputs():
    x = _gaussian(16, 256, seed=1)
    generator = torch.Generator().manual_seed(2)
    yield "gaussian", x
    yield "magnitudes", _gaussian(130, 64, seed=2) * 2.0 ** torch.arange(-118, 12)[:, None]
    yield "ties", torch.randint(-3, 4, (64, 256), generator=generator).float()
    yield "halves", torch.randint(-31, 32, (64, 256), generator=generator) / 2
    yield "one sign", torch.cat([x.abs(), -x.abs()])
    yield "constant", torch.tensor([0.0, -0.0, 1.5, -2.5, 1e-30])[:, None].expand(5, 64)
    sparse = torch.rand(x.shape, generator=generator) < 0.03
    yield "sparse", torch.where(sparse, x, 0.0)


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("name", [name for name, _ in _inputs()])
def test_the_bytes_of_the_package(kind, name):
    x = dict(_inputs())[name]
    with np.errstate(all="ignore"):
        expected = gguf.quantize(x.numpy(), _type(kind))
    assert np.array_equal(to_blocks(_encoded(x, kind), kind).numpy(), expected)


@pytest.mark.parametrize("kind", OURS)
def test_the_package_cannot_encode_the_others(kind):
    with pytest.raises(NotImplementedError):
        gguf.quantize(np.zeros((1, 256), np.float32), _type(kind))


def test_no_value_is_infinite(kind):
    q = _encoded(_gaussian(4, 256) * 1e9, kind)
    assert torch.isfinite(q.dequantize()).all()


def test_zeros(kind):
    assert not _encoded(torch.zeros(3, 300), kind).dequantize().any()
    assert _encoded(torch.zeros(0, 300), kind).dequantize().shape == (0, 300)


def test_rows_that_blocks_do_not_divide_end_with_zeros(kind):
    x = _gaussian(7, 300)
    q = _encoded(x, kind)
    assert q.shape == (7, 300)
    padded = _encoded(torch.nn.functional.pad(x, (0, 212)), kind)
    assert torch.equal(q.dequantize(), padded.dequantize()[:, :300])


def test_half_precision_and_strides(kind):
    x = _gaussian(256, 5).to(torch.bfloat16)
    q = _encoded(x.t(), kind)
    assert q.dtype == torch.bfloat16
    again = _encoded(x.t().float().contiguous(), kind)
    assert torch.equal(q.dequantize(torch.float32), again.dequantize())


# -- quality ---------------------------------------------------------------------------------------

#: SQNR in dB of Gaussian weights: measured to two digits, and a little more or less
QUALITY = {
    "q4_0": 21.3,
    "q4_1": 22.1,
    "q5_0": 27.4,
    "q5_1": 28.4,
    "q8_0": 45.4,
    "q2_k": 11.45,
    "q3_k": 16.85,
    "q4_k": 23.0,
    "q5_k": 29.05,
    "q6_k": 35.55,
    "iq4_nl": 22.7,
}


def test_quality_on_gaussian_weights(kind):
    x = _gaussian(64, 1024)
    assert float(sqnr(x, _encoded(x, kind).dequantize())) == pytest.approx(QUALITY[kind], abs=0.1)


@pytest.mark.parametrize("kind", OURS)
def test_the_search_is_better_than_the_range(kind):
    """On weights of every kind of distribution, heavy tails too, in every row."""
    x = _gaussian(12, 1024, seed=3)
    for values in (x, x.sign() * x.square(), x.sigmoid(), x.abs() + 1):
        ours = sqnr(values, _encoded(values, kind).dequantize())
        theirs = sqnr(values, quantize_tensor(values, _spec(kind)).dequantize())
        assert float(ours) > float(theirs) + 0.2


def test_one_block_is_near_the_best_of_all_scales():
    """iq4_nl against every 2,000th part of the range in float64: at most 5% more squared error."""
    x = _gaussian(20, 32, seed=4).double()
    values = torch.tensor(
        [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    ).double()
    for row in x:
        scales = torch.linspace(-1, 1, 4001).double()[:, None, None] * row.abs().max() / 80
        least = (row[:, None] - scales * values).square().amin(-1).sum(-1).amin()
        ours = (_encoded(row.float(), "iq4_nl").dequantize().double() - row).square().sum()
        assert 0.99 * least <= ours <= 1.05 * least


def test_encoding_again(kind):
    """Exactly the same values of THEIRS and iq4_nl; of the others far nearer than they were to x."""
    x = _gaussian(16, 512, seed=5)
    once = _encoded(x, kind).dequantize()
    twice = _encoded(once, kind).dequantize()
    if kind in (*THEIRS, "iq4_nl"):
        assert torch.equal(twice, once)
    else:
        assert float(sqnr(once, twice)) > float(sqnr(x, once)) + 15
        assert (twice == once).float().mean() > 0.8


# -- models ----------------------------------------------------------------------------------------


def test_small_filters_are_blocks_of_their_own(kind):
    conv = nn.Conv2d(8, 6, 3)
    dense = conv.weight.detach().clone()
    ao_core.quantize_(conv, GGUFWeightOnlyConfig(kind))
    assert isinstance(conv.weight, QTensor)
    assert conv.weight.shape == dense.shape
    assert float(sqnr(dense, conv.weight.dequantize())) > 8


def test_dense_values_are_quantized_by_their_range(kind):
    """`copy_` and loading a dense state dict know the format, not the search."""
    layer, dense = nn.Linear(300, 8), nn.Linear(300, 8)
    ao_core.quantize_(layer, GGUFWeightOnlyConfig(kind))
    layer.load_state_dict(dense.state_dict())
    assert kind_of(layer.weight) == kind
    expected = quantize_tensor(dense.weight, layer.weight.canonical().spec)
    assert torch.equal(layer.weight.dequantize(), expected.dequantize())
