"""Floats and tables that bitsandbytes, compressed-tensors and Model Optimizer store: the same values."""

from __future__ import annotations

import pytest
import torch

from ao_core import Spec, quantize_tensor
from ao_quant.interchange.bitsandbytes import BITSANDBYTES
from ao_quant.interchange.compressed import COMPRESSED
from ao_quant.interchange.modelopt import MODELOPT

NVFP4 = Spec("f4e2m1", (1, 16), Spec("f8e4m3", (-1, -1)), layout="packed")
MXFP4 = Spec("f4e2m1", (1, 32), "e8m0", layout="packed")
MXFP8 = Spec("f8e4m3", (1, 32), "e8m0")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(96, 256), (33, 50), (300, 128)])
def test_bitsandbytes_4_bits(kind, nested, shape, read) -> None:
    from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit

    x = torch.randn(shape)
    packed, state = quantize_4bit(x, quant_type=kind, compress_statistics=nested)
    theirs = dequantize_4bit(packed, state)
    tensors = {"m.weight": packed} | {
        f"m.weight.{k}": v for k, v in state.as_dict(packed=True).items()
    }
    tensor = read(BITSANDBYTES, tensors)
    assert torch.equal(tensor.dequantize(torch.float32), theirs.float())
    written = BITSANDBYTES.write("m.weight", tensor, {}).tensors
    assert set(written) == set(tensors)
    different = [n for n, t in tensors.items() if not torch.equal(written[n], t)]
    # a minus zero of fp4 is a zero of ao
    assert different in ([], ["m.weight"])
    assert kind == "fp4" or not different
    local = {n.removeprefix("m.weight."): t for n, t in written.items() if n != "m.weight"}
    back = QuantState.from_dict(local, device="cpu")
    assert torch.equal(dequantize_4bit(written["m.weight"], back), theirs)


def test_bitsandbytes_int8(read) -> None:
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    codes, scb, _ = int8_vectorwise_quant(torch.randn(64, 128).half())
    tensors = {
        "m.weight": codes,
        "m.SCB": scb,
        "m.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    tensor = read(BITSANDBYTES, tensors)
    theirs = int8_vectorwise_dequant(codes, scb)
    # they multiply by SCB, then by 1 / 127; ao by the product of both
    assert torch.allclose(tensor.dequantize(torch.float32), theirs.float(), rtol=2**-22, atol=0)
    written = BITSANDBYTES.write("m.weight", tensor, {}).tensors
    assert torch.equal(written["m.weight"], codes)
    assert torch.allclose(written["m.SCB"], scb, rtol=2**-23)


def _args(**fields):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=fields.pop("num_bits", 8), type="float", symmetric=True, **fields
    )
    return QuantizationScheme(targets=["Linear"], weights=args)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "channel", "tensor", "block"])
def test_compressed_tensors_reads_floats(kind) -> None:
    from compressed_tensors import compressors

    spec, scheme, name = {
        "nvfp4": (
            NVFP4,
            _args(num_bits=4, strategy="tensor_group", group_size=16),
            "NVFP4PackedCompressor",
        ),
        "mxfp4": (
            MXFP4,
            _args(num_bits=4, strategy="group", group_size=32),
            "MXFP4PackedCompressor",
        ),
        "mxfp8": (
            MXFP8,
            _args(strategy="group", group_size=32, scale_dtype=torch.uint8),
            "MXFP8QuantizationCompressor",
        ),
        "channel": (
            Spec("f8e4m3", (1, -1)),
            _args(strategy="channel"),
            "FloatQuantizationCompressor",
        ),
        "tensor": (
            Spec("f8e4m3", (-1, -1)),
            _args(strategy="tensor"),
            "FloatQuantizationCompressor",
        ),
        "block": (
            Spec("f8e4m3", (128, 128)),
            _args(strategy="block", block_structure=[128, 128]),
            "FloatQuantizationCompressor",
        ),
    }[kind]
    tensor = quantize_tensor(torch.randn(128, 256), spec)
    written = COMPRESSED.write("m.weight", tensor, {})
    local = {n.removeprefix("m."): t for n, t in written.tensors.items()}
    theirs = getattr(compressors, name).decompress(local, scheme)["weight"].float()
    ours = tensor.dequantize(theirs.dtype)
    if kind == "nvfp4":  # they divide by the reciprocal
        assert torch.allclose(ours, theirs, rtol=2**-7)
    else:
        assert torch.allclose(ours, theirs, rtol=0 if kind != "mxfp8" else 2**-8, atol=0)
    assert written.settings["format"].split("-")[0] in ("nvfp4", "mxfp4", "mxfp8", "float")


@pytest.mark.parametrize("shape", [(64, 128), (32, 48)])
def test_modelopt_nvfp4(shape, read) -> None:
    nvfp4 = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    x = torch.randn(shape)
    quantized, scale, shared = nvfp4.quantize(x, 16)
    tensors = {
        "m.weight": quantized._quantized_data,
        "m.weight_scale": scale,
        "m.weight_scale_2": shared,
    }
    tensor = read(MODELOPT, tensors, {"quant_method": "modelopt"}, dtype="float32")
    theirs = quantized.dequantize(
        dtype=torch.float32, scale=scale, double_scale=shared, block_sizes={-1: 16}, fast=False
    )
    assert torch.equal(tensor.dequantize(torch.float32), theirs)
    written = MODELOPT.write("m.weight", tensor, {}).tensors
    for name, theirs in tensors.items():
        assert torch.equal(
            written[name].reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)
        )


def test_modelopt_int4(read) -> None:
    pack = pytest.importorskip("modelopt.torch.export.quant_utils").pack_int4_in_uint8
    scale = torch.rand(64, 2) / 10 + 0.01
    values = torch.randint(-8, 8, (64, 128)) * scale.repeat_interleave(64, 1)
    tensors = {"m.weight": pack(values, scale, 64), "m.weight_scale": scale}
    tensors["m.pre_quant_scale"] = torch.rand(128) + 0.5
    tensor = read(MODELOPT, tensors, {"quant_method": "modelopt"}, dtype="float32")
    assert torch.allclose(
        tensor.dequantize(torch.float32), values * tensors["m.pre_quant_scale"], rtol=2**-22
    )
    written = MODELOPT.write("m.weight", tensor, {}).tensors
    assert all(torch.equal(written[name], t) for name, t in tensors.items())
