"""What a conversion holds: tensors that are on disk already, and slabs that are compared."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ao_core import Spec, quantize_tensor
from ao_core.ext import CheckpointError
from ao_core.ext.interchange import Source
from ao_core.ext.saving import write_checkpoint
from ao_quant.interchange import convert_checkpoint
from ao_quant.interchange.journal import Journal
from ao_quant.interchange.kept import forms_of
from ao_quant.interchange.torchao import TORCHAO
from ao_quant.interchange.verdicts import compare


def test_kept_tensors_are_read_from_disk(tmp_path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(2).bfloat16(),
        "c": torch.randn(2, dtype=torch.complex128),
        "d": torch.empty(0, 4),
        "e": torch.tensor(3, dtype=torch.int64),
    }
    journal = Journal(tmp_path / "work", 1 << 20)
    kept = journal.keep(tensors)
    assert forms_of(kept) == forms_of(tensors)
    assert len(kept) == len(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(kept[name], tensor)
        assert kept[name].data_ptr() != kept[name].data_ptr() or not tensor.numel()
    again = journal.keep({"z": torch.zeros(4)})  # nobody noted the others
    journal.add("z", again)
    assert [entry.name for entry in journal.done] == ["z"]
    assert journal.done[0].leaves["z"][2] == 0
    with (tmp_path / "work/data-0").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(CheckpointError, match="'z' is cut off"):
        again["z"]


@pytest.mark.parametrize(
    "spec",
    [
        Spec("f8e4m3", (128, 128)),
        Spec("f8e4m3", (-1, -1)),
        Spec("int8", (1, 32), "float16"),
        Spec("f4e2m1", (1, 16), Spec("f8e4m3", (-1, -1)), layout="packed"),
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [4096, 16384])
def test_slabs_are_cut_between_blocks(spec, columns) -> None:
    """A slab of a wide matrix has fewer rows than a block of FP8."""
    x = torch.randn(300, columns)
    tensor = quantize_tensor(x, spec)
    assert compare(tensor, tensor) == (0.0, None)
    dense = tensor.dequantize(torch.float32)
    greatest, sqnr = compare(tensor, quantize_tensor(x, Spec("int8", (1, -1))))
    other = quantize_tensor(x, Spec("int8", (1, -1))).dequantize(torch.float32)
    assert greatest == float((dense - other).abs().max())
    assert sqnr == pytest.approx(
        float(20 * (dense.norm() / (dense - other).norm()).log10()), abs=0.01
    )


def test_wide_blocks_of_fp8_convert(tmp_path) -> None:
    tensor = quantize_tensor(torch.randn(256, 4096), Spec("f8e4m3", (128, 128)))
    write_checkpoint({"a.weight": tensor}.items(), tmp_path / "ao")
    for to in ("fp8", "compressed-tensors"):
        assert convert_checkpoint(tmp_path / "ao", tmp_path / to, to).verdict == "bytes equal"


def test_no_conversion_imports_what_it_does_not_need(tmp_path) -> None:
    """Torch's distributed tensors and sympy are 40 MB, and slicing a subclass would import them."""
    tensor = quantize_tensor(torch.randn(256, 4096), Spec("int8", (1, 128), "float16"))
    write_checkpoint({"a.weight": tensor}.items(), tmp_path / "ao")
    code = (
        "import sys; from ao_quant.interchange import convert_checkpoint as convert\n"
        "convert(sys.argv[1], sys.argv[2], 'gptq')\n"
        "assert 'sympy' not in sys.modules and 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "ao", tmp_path / "out"], check=True)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_nvfp4_of_torchao(swizzled, shared) -> None:
    spec = Spec("f4e2m1", (1, 16), Spec("f8e4m3", (-1, -1)), layout="packed")
    tensor = quantize_tensor(torch.randn(130, 80).bfloat16(), spec)
    if not shared:
        tensor.scale.scale.fill_(1)
    written = TORCHAO.write("m.weight", tensor, {"swizzled": swizzled, "shared": shared})
    assert ("m._weight_per_tensor_scale" in written.tensors) == shared
    assert written.tensors["m._weight_scale"].shape == ((64, 32) if swizzled else (130, 5))
    header = TORCHAO.metadata({"m.weight": written.settings})
    source = Source(forms_of(written.tensors), written.tensors.__getitem__, metadata=header)
    weight = TORCHAO.read(source).weights["m.weight"]
    back = weight.make()
    assert torch.equal(back.dequantize(torch.float32), tensor.dequantize(torch.float32))
    again = TORCHAO.write("m.weight", back, weight.settings).tensors
    assert all(
        torch.equal(again[n].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8))
        for n, t in written.tensors.items()
    )


@pytest.mark.parametrize(
    ("kind", "parts", "why"),
    [
        ("MXTensor", ["qdata", "scale"], "Dequantize it with torchao"),
        ("NVFP4Tensor", ["qdata", "scale", "act_per_tensor_scale"], "Quantize without them"),
    ],
)
def test_what_is_refused_of_torchao_says_what_works(kind, parts, why) -> None:
    import json

    entry = {"_type": kind, "_data": {}, "_tensor_data_names": parts}
    header = {"tensor_names": '["m.weight"]', "m.weight": json.dumps(entry)}
    forms = {f"m._weight_{part}": (torch.uint8, (4, 8)) for part in parts}
    source = Source(forms, lambda name: torch.zeros(4, 8), metadata=header)
    assert why in TORCHAO.read(source).refused["m.weight"]
