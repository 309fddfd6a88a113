"""Which conversions between formats lose something: cases, what is expected, and what is found.

The expectations are those of a table that was written from the sources of the other projects. Where a
measured verdict differs from it, the row says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import PERMUTE
from ao_core.ext.interchange import ForeignWeight, Source, flatten
from ao_quant.interchange.integers import integers_of, tensor_of
from ao_quant.interchange.one import convert_weight
from ao_quant.interchange.records import INTERCHANGE
from ao_quant.interchange.verdicts import BYTES, REFUSED, REGRIDDED, VALUES, Verdict

FORMATS = {form.name: form for form in INTERCHANGE}
EQUAL = (BYTES, VALUES)
SHAPE = (64, 256)


class Case(NamedTuple):
    """A weight in one format that goes to another."""

    what: str
    #: of a format; "ao": its own
    source: str
    target: str
    make: Callable[[], QTensor]
    #: verdicts that are right
    expected: tuple[str, ...]
    #: least SQNR in dB where values may change
    least: float = 0.0
    #: how this corrects the table that was read from sources; empty: it does not
    correction: str = ""


def _x() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).half()


def _of(
    dtype: str, group: int, scale: str, zero: str = "none", *, size: float = 1.0
) -> Callable[[], QTensor]:
    layout = "plain" if "8" in dtype else "packed"
    return lambda: quantize_tensor(
        _x() if size == 1.0 else _x().float() * size, Spec(dtype, (1, group), scale, zero, layout)
    )


def _with_zero(zero: int) -> Callable[[], QTensor]:
    def make() -> QTensor:
        tensor = _of("uint4", 64, "float16", "int")()
        tensor.zero_point.clamp_(1, 15)
        tensor.zero_point[3, 1] = zero
        return tensor

    return make


def _beyond() -> QTensor:
    """4 bits and a zero point that is no code, as version 1 of GPTQ can have it."""
    found = integers_of(_with_zero(5)())
    assert found is not None
    assert found.zero is not None
    found.zero[3, 1] = 16
    return tensor_of(found, torch.float16)


def _permuted() -> QTensor:
    spec = Spec("uint4", (1, 64), "float16", "int", "packed", input=(PERMUTE,))
    order = torch.randperm(SHAPE[1], generator=torch.Generator().manual_seed(1))
    return quantize_tensor(_x(), spec, in_perm=order)


NVFP4 = Spec("f4e2m1", (1, 16), Spec("f8e4m3", (-1, -1)), layout="packed")
MXFP4 = Spec("f4e2m1", (1, 32), "e8m0", layout="packed")
_FOUR = ("gptq_v2", "compressed-tensors", "awq", "onnx")
_EIGHT = ("gptq_v2", "compressed-tensors", "onnx")
_PACKED = "integers, float16 scales"

CASES: tuple[Case, ...] = (
    *(Case(f"4-bit {_PACKED}", a, b, _with_zero(5), EQUAL) for a in _FOUR for b in _FOUR if a != b),
    *(
        Case(f"8-bit {_PACKED}", a, b, _of("uint8", 64, "float16", "int"), EQUAL)
        for a in _EIGHT
        for b in _EIGHT
        if a != b
    ),
    Case("zero points from 1 to 15", "gptq", "gptq_v2", _with_zero(5), EQUAL),
    Case("zero points from 1 to 15", "gptq_v2", "gptq", _with_zero(5), EQUAL),
    Case("a zero point of 0", "gptq_v2", "gptq", _with_zero(0), (REGRIDDED,)),
    Case(
        "a zero point of 16",
        "ao",
        "gptq_v2",
        _beyond,
        EQUAL,
        correction="it becomes a weight of 8 bits, which holds 16",
    ),
    Case("int4 of 32, float16", "ao", "gguf", _of("int4", 32, "float16"), EQUAL),
    Case("int8 of 32, float16", "ao", "gguf", _of("int8", 32, "float16"), EQUAL),
    Case("int4 of 32, float32 scales", "ao", "gguf", _of("int4", 32, "float32"), (REGRIDDED,)),
    Case(
        "int4 of 32, bfloat16 scales",
        "ao",
        "gguf",
        _of("int4", 32, "bfloat16"),
        EQUAL,
        correction="a bfloat16 in the range of float16 is one",
    ),
    Case("uint4 of 32", "ao", "gguf", _of("uint4", 32, "float16", "int"), (REGRIDDED,), 60),
    Case("uint4 of 32", "ao", "mlx", _of("uint4", 32, "float16", "int"), (REGRIDDED,), 60),
    Case(
        "uint4 of 32",
        "ao",
        "torchao",
        _of("uint4", 32, "float16", "int"),
        EQUAL,
        correction="IntxUnpackedToInt8Tensor keeps zero points; Int4Tensor would round",
    ),
    Case("4 bits of 32, float16", "mlx", "gguf", _of("uint4", 32, "float16", "offset"), EQUAL),
    *(
        Case(
            "zero points between codes",
            "hqq",
            to,
            _of("uint4", 64, "float16", "float"),
            (REGRIDDED,),
        )
        for to in ("gptq_v2", "awq", "compressed-tensors")
    ),
    *(
        Case(
            "zero points between codes",
            "hqq",
            to,
            _of("uint4", 64, "float16", "float"),
            (REGRIDDED,),
            60,
        )
        for to in ("mlx", "gguf")
    ),
    Case(
        "NF4",
        "bitsandbytes",
        "ao",
        lambda: quantize_tensor(_x(), Spec("nf4", (1, 64), "float32", layout="packed")),
        EQUAL,
    ),
    Case(
        "NF4, scales in float8",
        "ao",
        "bitsandbytes",
        lambda: quantize_tensor(
            _x(), Spec("nf4", (1, 64), Spec("f8e4m3", (-1, -1)), layout="packed")
        ),
        EQUAL,
        correction="scales become the float32 numbers that they stand for",
    ),
    Case(
        "NVFP4",
        "modelopt",
        "compressed-tensors",
        lambda: quantize_tensor(_x(), NVFP4),
        (*EQUAL, REGRIDDED),
        120,
    ),
    Case(
        "NVFP4",
        "compressed-tensors",
        "modelopt",
        lambda: quantize_tensor(_x(), NVFP4),
        (*EQUAL, REGRIDDED),
        120,
    ),
    Case("MXFP4", "compressed-tensors", "gguf", lambda: quantize_tensor(_x(), MXFP4), EQUAL),
    Case("MXFP4", "gguf", "compressed-tensors", lambda: quantize_tensor(_x(), MXFP4), EQUAL),
    Case("MXFP4 experts", "mxfp4", "ao", lambda: _experts(), EQUAL),
    *(
        Case(
            "bfloat16 scales",
            "compressed-tensors",
            to,
            _of("uint4", 64, "bfloat16", "int"),
            EQUAL,
            correction="a bfloat16 in the range of float16 is one",
        )
        for to in ("gptq_v2", "awq")
    ),
    *(
        Case(
            "bfloat16 scales below float16",
            "compressed-tensors",
            to,
            _of("uint4", 64, "bfloat16", "int", size=1e-7),
            (REGRIDDED,),
        )
        for to in ("gptq_v2", "awq")
    ),
    *(
        Case("columns in another order", "gptq_v2", to, _permuted, (REGRIDDED,))
        for to in ("awq", "onnx", "mlx", "torchao")
    ),
    Case("columns in another order", "gptq_v2", "gguf", _permuted, (REFUSED,)),
)


def _experts() -> QTensor:
    made = quantize_tensor(
        torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0)), MXFP4
    )
    found = made.transpose(1, 2)
    assert isinstance(found, QTensor)
    return found


def verdict_on(case: Case) -> Verdict:
    """What becomes of the weight of a case."""
    tensor, target = case.make(), FORMATS.get(case.target)
    if case.source == "ao":
        leaves, _ = flatten("m.weight", tensor)
        own = ForeignWeight(tuple(leaves), lambda: tensor)
        return convert_weight("m.weight", own, leaves.__getitem__, None, target).verdict
    form = FORMATS[case.source]
    written = form.write("m.weight", tensor, {})
    settings = {"m.weight": written.settings}
    forms = {name: (t.dtype, tuple(t.shape)) for name, t in written.tensors.items()}
    source = Source(
        forms,
        lambda name: written.tensors[name].clone(),
        {"dtype": "float16"},
        form.config(settings, ()),
        form.metadata(settings),
    )
    weight = form.read(source).weights["m.weight"]
    return convert_weight("m.weight", weight, source.take, form, target).verdict
