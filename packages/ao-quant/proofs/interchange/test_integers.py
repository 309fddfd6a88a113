"""Integers that GPT-QModel, compressed-tensors, HQQ and MLX pack and unpack: the same values, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ao_quant.interchange.compressed import COMPRESSED
from ao_quant.interchange.gptq import GPTQ, GPTQ_V2
from ao_quant.interchange.hqq import HQQ
from ao_quant.interchange.mlx import MLX


def _local(tensors):
    return {name.removeprefix("m."): t for name, t in tensors.items()}


def _scheme(bits, symmetric, group):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="group", group_size=group)
    return QuantizationScheme(targets=["Linear"], weights=args)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_compressed_tensors_unpacks_what_is_written(bits, symmetric, integers) -> None:
    from compressed_tensors.compressors import PackedQuantizationCompressor

    tensor = integers(bits, symmetric)
    written = COMPRESSED.write("m.weight", tensor, {"format": "pack-quantized"})
    scheme = _scheme(bits, symmetric, 32)
    theirs = PackedQuantizationCompressor.decompress(_local(written.tensors), scheme)
    assert torch.equal(theirs["weight"].half(), tensor.dequantize(torch.float16))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_what_compressed_tensors_packs_is_read(bits, symmetric, integers, read) -> None:
    from compressed_tensors.compressors import PackedQuantizationCompressor

    state = {
        "weight": torch.randn(48, 128).half(),
        "weight_scale": torch.rand(48, 4).half() / 10 + 0.01,
    }
    if not symmetric:
        high = 1 << (bits - 1)
        state["weight_zero_point"] = torch.randint(-high, high, (48, 4), dtype=torch.int8)
    scheme = _scheme(bits, symmetric, 32)
    packed = PackedQuantizationCompressor.compress(state, scheme)
    theirs = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    label = {
        "config_groups": {
            "g": {"targets": ["Linear"], "weights": {"num_bits": bits, "group_size": 32}}
        }
    }
    tensor = read(COMPRESSED, {f"m.{name}": t for name, t in packed.items()}, label)
    assert torch.equal(theirs.half(), tensor.dequantize(torch.float16))
    again = COMPRESSED.write("m.weight", tensor, {"format": "pack-quantized"}).tensors
    assert all(torch.equal(again[f"m.{name}"], t) for name, t in packed.items())


def _module(bits, symmetric, shape, group):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    return TorchLinear(bits, group, symmetric, False, shape[1], shape[0])


@pytest.mark.parametrize("form", [GPTQ, GPTQ_V2], ids=lambda form: form.name)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("permuted", [False, True])
def test_gptqmodel_packs_and_dequantizes_the_same(
    bits, symmetric, permuted, form, integers, read
) -> None:
    tensor = integers(bits, symmetric)
    module = _module(bits, symmetric, tuple(tensor.shape), 32)
    scale = tensor.scale.float()
    zero = torch.full_like(scale, 1 << (bits - 1)) if symmetric else tensor.zero_point.float()
    zero = zero.clamp(min=1)
    g_idx = (torch.arange(128) // 32).int()
    g_idx = g_idx[torch.randperm(128)] if permuted else g_idx
    codes = torch.randint(0, 1 << bits, tuple(tensor.shape)).float()
    values = (codes - zero[:, g_idx.long()]) * scale[:, g_idx.long()]
    linear = torch.nn.Linear(128, 64, bias=False)
    linear.weight.data = values
    module.pack_block(linear, scale, zero, g_idx)
    theirs = module.dequantize_weight().t()
    buffers = {
        f"m.{name}": b
        for name, b in module.named_buffers()
        if name in ("qweight", "qzeros", "scales", "g_idx")
    }
    label = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "checkpoint_format": "gptq_v2",
        "sym": symmetric,
    }
    ours = read(GPTQ_V2, buffers, label)
    assert torch.equal(ours.dequantize(torch.float16), theirs.half())
    assert torch.equal(ours.dequantize(torch.float32), values)
    written = form.write("m.weight", ours, {}).tensors
    if form is GPTQ_V2:
        assert all(torch.equal(written[name], b) for name, b in buffers.items())
    else:  # version 1 becomes theirs by adding 1 to each zero point
        label["checkpoint_format"] = "gptq"
        assert torch.equal(read(GPTQ, dict(written), label).dequantize(torch.float32), values)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(64, 128), (24, 64)])
def test_hqq_layers_are_read_and_written(bits, shape, read) -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    linear = torch.nn.Linear(shape[1], shape[0], bias=False)
    config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
    layer = HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
    layer.encoded_state_dict = True
    state = {f"m.{name}": t.detach() for name, t in layer.state_dict().items()}
    tensor = read(HQQ, state)
    assert torch.equal(tensor.dequantize(torch.float32), layer.dequantize().float())
    written = HQQ.write("m.weight", tensor, {}).tensors
    assert all(
        torch.equal(written[n], state[n])
        for n in ("m.W_q", "m.scale", "m.zero", "m.shape", "m.packing")
    )
    other = HQQLinear(None, None, compute_dtype=torch.float32, device="cpu")
    other.load_state_dict(_local(written))
    assert torch.equal(other.dequantize().float(), layer.dequantize().float())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_quantizes_and_dequantizes_the_same(bits, group, read, integers) -> None:
    mx = pytest.importorskip("mlx.core")
    import numpy as np

    x = mx.array(torch.randn(32, 256).numpy()).astype(mx.float16)
    packed, scales, biases = mx.quantize(x, group_size=group, bits=bits)
    tensors = {
        "m.weight": torch.from_numpy(np.array(packed)),
        "m.scales": torch.from_numpy(np.array(scales)),
        "m.biases": torch.from_numpy(np.array(biases)),
    }
    tensor = read(MLX, tensors, {"bits": bits, "group_size": group})
    theirs = torch.from_numpy(
        np.array(mx.dequantize(packed, scales, biases, group_size=group, bits=bits))
    )
    # they round the product to float16 before the sum, or not, by processor: one step of the greater of both
    error = (theirs.float() - tensor.dequantize(torch.float32)).abs()
    assert bool((error <= theirs.float().abs().amax() * 2**-10).all())
    written = MLX.write("m.weight", tensor, {}).tensors
    assert all(torch.equal(written[name], t) for name, t in tensors.items())
