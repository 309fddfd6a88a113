"""The kernels of matmuls whose operands are both quantized: of `ComputeWeight`s, and of dynamic weights.

The custom op behind them is made when one is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ao_core import Call, Kernel, QTensor, Spec
from ao_core.ext import ROW, TENSOR, Parts, registry
from ao_core.ext.kernels import encode_parts, lost_rows, static_qparams
from ao_core.ext.numerics import scale_to_float
from ao_kernels.triton.scaled_mm.layout import RowSums
from ao_kernels.triton.shared.device import current_device, unavailable, unavailable_float8
from ao_kernels.triton.shared.known_answer import MATMUL, Sample, every_code, noise, proven

if TYPE_CHECKING:
    from ao_kernels.triton.scaled_mm.launch import TileConfig

__all__ = ["DYNAMIC_KERNELS", "SCALED_LAYOUTS"]

_GROUP, _SQUARE = (1, 128), (128, 128)
#: block → what the kernel calls it
_KINDS: dict[tuple[int, ...], str] = {
    TENSOR: "one",
    ROW: "row",
    _GROUP: "block",
    _SQUARE: "square",
}
#: blocks of activations and of weights
_PAIRS = (
    *((a, b) for a in (TENSOR, ROW) for b in (TENSOR, ROW)),
    (_GROUP, _GROUP),
    (_GROUP, _SQUARE),
)
_FLOAT8 = ("f8e4m3", "f8e5m2")
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
#: zero points of activations → columns that sums in int32 may pass: each product of codes is up to 2**14,
#: and so is what the zero point takes off for each
_TOO_LONG = {"none": 1 << 17, "int": 1 << 16}
#: op → the one of torch, which has cuBLAS for one scale per tensor
_OF_TORCH = {"linear": "scaled_mm", "mm": "scaled_matmul"}


def _multiply(
    a: Tensor,
    b: Tensor,
    spec: Spec,
    bias: Tensor | None = None,
    offs: Tensor | None = None,
    qparams: tuple[Tensor | None, Tensor | None] = (None, None),
    config: TileConfig | None = None,
) -> Tensor:
    """A (M, K), quantized as `spec.act` says, times the transpose of b (…, N, K), cast as `spec` says."""
    from ao_kernels.triton.scaled_mm.launch import launch, scaled_matmul

    act = spec.act
    assert act is not None
    multiply = scaled_matmul if config is None else partial(launch, config=config)
    left, right = encode_parts(a, act, *qparams), encode_parts(b, spec)
    codes, zero_point = _signed(left)
    out: Tensor = multiply(
        codes, right["qdata"], scale_to_float(left["scale"]), scale_to_float(right["scale"]),
        _KINDS[act.block], _KINDS[spec.block], a.dtype, zero_point, bias, offs,
        bool(spec.option("fast_accum", True)),
    )  # fmt: skip
    return out


def _signed(left: Parts) -> tuple[Tensor, Tensor | None]:
    """Codes and zero points of activations: tensor cores want both signed, so both move down."""
    codes, zero_point = left["qdata"], left.get("zero_point")
    if zero_point is None:
        return codes, None
    return (codes ^ 128).view(torch.int8), zero_point.to(torch.int32) - 128


def linear(
    x: Tensor, w: QTensor, bias: Tensor | None, *, config: TileConfig | None = None
) -> Tensor:
    """Quantize the activations, and multiply: scales, zero points and bias are applied inside."""
    given = static_qparams(w)
    return _by_row(
        x, w, lambda rows: _multiply(rows, w, w.spec, bias, qparams=given, config=config)
    )


def linear_with_sums(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """`linear` where the weight has the sums of its rows: it is read once."""
    from ao_kernels.triton.scaled_mm.launch import scaled_matmul

    act, parts, k = w.spec.act, w.parts, x.shape[-1]
    assert act is not None

    def multiply(rows: Tensor) -> Tensor:
        left = encode_parts(rows, act, *static_qparams(w))
        codes, zero_point = _signed(left)
        out: Tensor = scaled_matmul(
            codes, parts["qdata"][:, :k], scale_to_float(left["scale"]), scale_to_float(parts["scale"]),
            _KINDS[act.block], _KINDS[w.spec.block], x.dtype, zero_point, bias, None, True, parts["sums"],
        )  # fmt: skip
        return out

    return _by_row(x, w, multiply)


def _by_row(x: Tensor, w: QTensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """The matmul of x (…, K); rows that have no codes become NaN."""
    assert w.spec.act is not None
    rows = x.reshape(-1, x.shape[-1])
    lost = lost_rows(rows, w.spec.act)
    if lost is not None:
        rows = rows.masked_fill(lost, 0)
    out = multiply(rows)
    out = out if lost is None else out.masked_fill(lost, torch.nan)
    return out.reshape(*x.shape[:-1], w.shape[0])


def grouped_linear(
    x: Tensor, w: QTensor, offs: Tensor | None, *, config: TileConfig | None = None
) -> Tensor:
    """`linear` for the rows of each expert, in one launch that does not wait to know them."""
    return _by_expert(x, w, offs, w.spec, config)


def mm(a: Tensor, b: Tensor, spec: Spec, *, config: TileConfig | None = None) -> Tensor:
    """Cast both operands, and multiply."""
    return _multiply(a, b, spec, config=config)


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None, spec: Spec, *, config: TileConfig | None = None
) -> Tensor:
    """`mm` for the rows of each expert."""
    return _by_expert(a, b, offs, spec, config)


def _by_expert(
    a: Tensor, b: Tensor, offs: Tensor | None, spec: Spec, config: TileConfig | None
) -> Tensor:
    if offs is None:
        experts, m = a.shape[:2]
        offs = torch.arange(m, (experts + 1) * m, m, dtype=torch.int32, device=a.device)
    out = _multiply(a.reshape(-1, a.shape[-1]), b, spec, offs=offs, config=config)
    return out.reshape(*a.shape[:-1], b.shape[-2])


def _refuses_float8(call: Call) -> str | None:
    spec, act = call.spec, call.spec.act
    if act is None or act.dtype not in _FLOAT8 or spec.dtype not in _FLOAT8:
        return f"needs both operands in float8, found {spec}"
    if (act.zero_point, spec.zero_point) != ("none", "none"):
        return f"has no zero points of float8, found {spec}"
    if reason := _refused(call, spec, act):
        return reason
    if spec.block == TENSOR and call.op in _OF_TORCH:
        of_torch = registry.kernels.get(_OF_TORCH[call.op])
        if of_torch.refuses(call) is None:
            return f"leaves scales of tensors to {of_torch.name}, which has cuBLAS"
    return None


def _refuses_int8(call: Call) -> str | None:
    spec, act = call.spec, call.spec.act
    if act is None or (act.dtype, act.zero_point) not in (("int8", "none"), ("uint8", "int")):
        return f"needs activations in int8, or in uint8 with zero points, found {spec}"
    if (spec.dtype, spec.zero_point) != ("int8", "none"):
        return f"needs weights in int8 without zero points, found {spec}"
    if _GROUP in (act.block, spec.block):
        return f"sums whole rows in int32, found {spec}"
    if (k := call.weight_shape[-1]) >= (most := _TOO_LONG[act.zero_point]):
        return f"sums whole rows in int32, which {most} columns or more may pass, found {k}"
    return _refused(call, spec, act)


def _refused(call: Call, spec: Spec, act: Spec) -> str | None:
    """What both kinds of codes have in common."""
    if isinstance(spec.scale_dtype, Spec) or isinstance(act.scale_dtype, Spec):
        return "needs scales that are not quantized themselves"
    if (act.block, spec.block) not in _PAIRS:
        return (
            "needs scales of tensors or rows, or of 128 columns beside 128 × 128 or 128 columns, found "
            f"{spec}"
        )
    if call.x_dtype not in _OUTPUTS:
        return f"writes bfloat16, float16 and float32, not {call.x_dtype}"
    if call.m == 0 or 0 in call.weight_shape:
        return "needs a matmul that is not empty"
    if call.op.startswith("grouped"):
        return _refused_for_experts(call, spec, act)
    return None


def _refused_for_experts(call: Call, spec: Spec, act: Spec) -> str | None:
    if len(call.weight_shape) != 3:
        return "has no matmul whose contracted dimension is the one of the rows"
    if act.block == TENSOR:
        return f"needs activations whose scales do not depend on the expert, found {spec}"
    if spec.block not in (ROW, _SQUARE):
        return f"needs weights with scales of rows, or of 128 × 128, found {spec}"
    return None


def _config(call: Call) -> TileConfig:
    from ao_kernels.triton.scaled_mm.launch import promotes, tile_config_for

    spec, act = call.spec, call.spec.act
    assert act is not None  # accepted
    *experts, n, _ = call.weight_shape
    promote = promotes(_code_dtype(act), _KINDS[act.block], bool(spec.option("fast_accum", True)))
    return tile_config_for(max(call.m, 1), n, prod(experts), current_device(), promote=promote)


def _describe(call: Call) -> str:
    config = _config(call)
    return f"tiles of {config.block_m} × {config.block_n}, scales inside"


_OWN: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "grouped_linear": grouped_linear,
    "mm": mm,
    "grouped_mm": grouped_mm,
}


def _sample(call: Call) -> Sample:
    """A tile of the result, with two of K; of experts two."""
    config, spec, grouped = _config(call), call.spec, call.op.startswith("grouped")
    m, k = min(max(call.m, 1), config.block_m), 256 - (16 if call.weight_shape[-1] % 128 else 0)
    shape = (*((2,) if grouped else ()), config.block_n, k)

    def arguments() -> tuple[object, ...]:
        x = noise((2 * m if grouped else m, k), call.x_dtype)
        of_experts = (torch.tensor([m, 2 * m], dtype=torch.int32),) if grouped else ()
        if call.op.endswith("mm"):
            return x, noise(shape, call.x_dtype), *of_experts, spec
        bias = () if grouped else (noise((config.block_n,), call.x_dtype),)
        return x, every_code(spec, shape), *of_experts, *bias

    own = partial(_OWN[call.op], config=config) if spec.layout == "plain" else None
    facts = (repr(spec), call.x_dtype, config, m, k)
    return Sample(facts, arguments, MATMUL, fn=own)


def _code_dtype(spec: Spec) -> torch.dtype:
    """Of the codes as the matmul takes them."""
    stored = registry.dtypes.get(spec.dtype).storage
    return torch.int8 if stored == torch.uint8 else stored


_Refuses = Callable[[Call], str | None]


def _kernels(
    numbers: str, unavailable: Callable[[], str | None], refuses: _Refuses
) -> tuple[Kernel, ...]:
    make = partial(
        Kernel, layout="plain", device="cuda", priority=50, unavailable=unavailable,
        describe=_describe,
    )  # fmt: skip
    return tuple(
        make(f"triton_{numbers}_{op}", op, fn=fn, refuses=proven(op, fn, refuses, _sample))
        for op, fn in _OWN.items()
    )


SCALED_LAYOUTS = (RowSums(),)
DYNAMIC_KERNELS = (
    Kernel(
        "triton_row_sums_linear",
        "linear",
        "row_sums",
        "cuda",
        linear_with_sums,
        50,
        unavailable,
        proven("linear", linear_with_sums, _refuses_int8, _sample),
        _describe,
    ),
    *_kernels("float8", unavailable_float8, _refuses_float8),
    *_kernels("int8", unavailable, _refuses_int8),
)
