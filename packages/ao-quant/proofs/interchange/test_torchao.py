"""torchao's own classes from what is written, and what it writes read."""

from __future__ import annotations

import pytest
import torch

from ao_core import Spec, quantize_tensor
from ao_core.ext.interchange import Source
from ao_quant.interchange.torchao import TORCHAO


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (Spec("int8", (1, -1), "bfloat16"), "Int8Tensor"),
        (Spec("uint3", (1, 32), "bfloat16", "int", "packed"), "IntxUnpackedToInt8Tensor"),
        (Spec("int6", (1, 64), "float32", layout="packed"), "IntxUnpackedToInt8Tensor"),
        (Spec("f8e4m3", (1, -1)), "Float8Tensor"),
        (Spec("f8e4m3", (-1, -1)), "Float8Tensor"),
    ],
    ids=str,
)
def test_torchao_dequantizes_what_is_written(spec, kind, read) -> None:
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    tensor = quantize_tensor(torch.randn(64, 128).bfloat16(), spec)
    written = TORCHAO.write("m.weight", tensor, {})
    metadata = TORCHAO.metadata({"m.weight": written.settings})
    theirs, left = support.unflatten_tensor_state_dict(dict(written.tensors), metadata)
    assert not left
    assert type(theirs["m.weight"]).__name__ == kind
    assert torch.equal(theirs["m.weight"].dequantize(), tensor.dequantize(torch.bfloat16))
    flat, header = support.flatten_tensor_state_dict(theirs)
    again = read(TORCHAO, flat, metadata=header)
    assert torch.equal(again.dequantize(torch.float32), tensor.dequantize(torch.float32))


def test_int4_of_torchao(read) -> None:
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    from torchao.quantization import Int4Tensor

    codes = torch.randint(0, 16, (32, 128), dtype=torch.uint8)
    packed = ((codes[:, ::2]) | (codes[:, 1::2] << 4)).view(torch.int8)
    scale, zero = torch.rand(4, 32).bfloat16(), torch.randn(4, 32).bfloat16()
    theirs = Int4Tensor(packed, scale, zero, [1, 32], torch.Size((32, 128)))
    flat, header = support.flatten_tensor_state_dict({"m.weight": theirs})
    tensor = read(TORCHAO, flat, metadata=header, dtype="bfloat16")
    signed = (codes.int() + 8) % 16 - 8
    each = [t.t().float().repeat_interleave(32, 1) for t in (scale, zero)]
    assert torch.equal(tensor.dequantize(torch.float32), signed * each[0] + each[1])
    written = TORCHAO.write("m.weight", tensor, {}).tensors
    for name in flat:
        assert torch.equal(written[name].view(torch.uint8), flat[name].view(torch.uint8))


@pytest.mark.parametrize("shape", [(64, 128), (130, 80), (256, 256)], ids=str)
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_nvfp4_of_torchao_there_and_back(shape, swizzled, shared) -> None:
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    x = torch.randn(shape, dtype=torch.bfloat16)
    number = x.abs().max().float() / (6 * 448) if shared else None
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=number, is_swizzled_scales=swizzled)
    flat, header = support.flatten_tensor_state_dict({"m.weight": theirs})
    forms = {name: (t.dtype, tuple(t.shape)) for name, t in flat.items()}
    source = Source(forms, flat.__getitem__, metadata=header)
    weight = TORCHAO.read(source).weights["m.weight"]
    tensor = weight.make()
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor.dequantize(torch.float32), theirs.dequantize(torch.float32))
    written = TORCHAO.write("m.weight", tensor, weight.settings)
    assert written.tensors.keys() == flat.keys()
    for name in flat:
        assert written.tensors[name].shape == flat[name].shape
        assert torch.equal(
            written.tensors[name].reshape(-1).view(torch.uint8),
            flat[name].reshape(-1).view(torch.uint8),
        )
    metadata = TORCHAO.metadata({"m.weight": written.settings})
    again, left = support.unflatten_tensor_state_dict(dict(written.tensors), metadata)
    assert not left
    assert type(again["m.weight"]) is NVFP4Tensor
    assert torch.equal(again["m.weight"].dequantize(), theirs.dequantize())
