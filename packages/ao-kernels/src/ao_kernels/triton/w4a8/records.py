"""The kernels of linear layers with weights in 4 bits whose activations are quantized to 8."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ao_core import WHOLE, Call, Kernel, QTensor, Spec
from ao_core.ext.kernels import encode_parts, lost_rows, static_qparams
from ao_core.ext.numerics import full_block, scale_to_float
from ao_kernels.triton.shared.device import (
    current_device,
    sm_count,
    unavailable,
    unavailable_float8,
)
from ao_kernels.triton.shared.known_answer import MATMUL, Sample, every_code, noise, proven
from ao_kernels.triton.shared.tile_config import LaunchConfig, described
from ao_kernels.triton.shared.tiling import BLOCK_N
from ao_kernels.triton.w4a8.layout import WIDTH, Plane32, tiling

__all__ = ["DYNAMIC4_KERNELS", "DYNAMIC4_LAYOUTS"]

_BLOCKS = ((1, WHOLE), (WHOLE, WHOLE))
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
#: products in int8 of a row whose sum may pass int32: each is of up to 2**14
_TOO_LONG = 1 << 17


def linear(x: Tensor, w: QTensor, bias: Tensor | None) -> Tensor:
    """Quantize the activations, and multiply: scales, zero points and bias are applied inside."""
    from ao_kernels.triton.w4a8.launch import plane32_linear

    act, parts = w.spec.act, w.parts
    assert act is not None
    n, k = w.stored_shape
    rows = x.reshape(-1, k)
    lost = lost_rows(rows, act)
    if lost is not None:
        rows = rows.masked_fill(lost, 0)
    left = encode_parts(rows, act, *static_qparams(w))
    out: Tensor = plane32_linear(
        left["qdata"], scale_to_float(left["scale"]), left.get("zero_point"), parts["qdata"], parts["scale"],
        parts.get("zero_point"), parts.get("sums"), bias,
        n, full_block(w.spec.block, (n, k))[-1], w.spec.dtype, x.dtype,
    )  # fmt: skip
    out = out if lost is None else out.masked_fill(lost, torch.nan)
    return out.reshape(*x.shape[:-1], n)


def _refuses_integers(call: Call) -> str | None:
    k = call.weight_shape[-1]
    if k >= _TOO_LONG and full_block(call.spec.block, call.weight_shape)[-1] >= k:
        return f"sums rows in int32, which {k} columns may pass; groups are summed in float32"
    return _refused(call, ("int8", "uint8"))


def _refuses_float8(call: Call) -> str | None:
    return _refused(call, ("f8e4m3",))


def _refused(call: Call, formats: tuple[str, ...]) -> str | None:
    act = call.spec.act
    if act is None or act.dtype not in formats:
        return f"needs activations in {' or '.join(formats)}, found {act}"
    if act.block not in _BLOCKS or isinstance(act.scale_dtype, Spec):
        return f"needs activations with one scale per row, or one for all, found {act}"
    if call.x_dtype not in _OUTPUTS:
        return f"writes bfloat16, float16 and float32, not {call.x_dtype}"
    return None


def _config(call: Call) -> LaunchConfig:
    from ao_kernels.triton.w4a8.launch import launch_config_of

    spec, (n, k) = call.spec, call.weight_shape
    tiles = tiling(n, k, full_block(spec.block, (n, k))[-1])
    sms = sm_count(current_device())
    return launch_config_of(tiles, max(call.m, 1), sms, zero_point=spec.zero_point != "none")


def _describe(call: Call) -> str:
    assert call.spec.act is not None  # accepted
    return f"activations as {call.spec.act.dtype}, {described(_config(call))}"


def _sample(call: Call) -> Sample:
    """A tile of N, and of K as many as are split where those of the call are."""
    (config, splits), (_, k) = _config(call), call.weight_shape
    tiles, ragged = 4 if splits > 1 else 2, 16 if k % WIDTH else 0
    whole = full_block(call.spec.block, call.weight_shape)[-1] >= k
    spec = replace(call.spec, block=(1, WHOLE)) if whole else call.spec
    shape = (BLOCK_N, tiles * WIDTH - ragged)
    m = min(max(call.m, 1), config.block_m)

    def arguments() -> tuple[object, ...]:
        return (
            noise((m, shape[1]), call.x_dtype),
            every_code(spec, shape),
            noise((BLOCK_N,), call.x_dtype),
        )

    return Sample((repr(spec), call.x_dtype, config, splits > 1, shape), arguments, MATMUL)


DYNAMIC4_LAYOUTS = (Plane32(),)
DYNAMIC4_KERNELS = (
    Kernel(
        "triton_int8_int4_linear", "linear", "plane32", "cuda", linear, 50,
        unavailable, proven("linear", linear, _refuses_integers, _sample), _describe,
    ),
    Kernel(
        "triton_float8_int4_linear", "linear", "plane32", "cuda", linear, 50,
        unavailable_float8, proven("linear", linear, _refuses_float8, _sample), _describe,
    ),
)  # fmt: skip
