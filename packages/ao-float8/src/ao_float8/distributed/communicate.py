"""Activations and gradients that travel in float8: all-gathers of `DTensor`s, with gradients.

Only a cast with one scale for the tensor is sent: the matmuls that take the values cast them again, and
find the same codes. One scale per row in one matmul has one scale per column in another beside it, so such
values travel in high precision, as those that a matmul takes in high precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ao_core import ComputeWeight, QTensor, Spec
from ao_core.ext import TENSOR
from ao_core.ext.compute import all_reduce_max, cast_shard, shared_cast
from ao_core.ext.numerics import block_absmax

__all__ = ["casts_of", "gathered", "redistributed"]


def casts_of(weight: Tensor | None) -> tuple[Spec | None, Spec | None]:
    """How the input of a layer and the gradient of its output may travel; None: in high precision."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if not isinstance(local, ComputeWeight):
        return None, None
    output, grad_input, grad_weight = local.matmuls
    if output is None or grad_input is None or grad_weight is None:
        return None, None
    of_input = shared_cast(output.act, grad_weight)
    of_gradient = shared_cast(grad_input.act, grad_weight.act)
    return _sendable(of_input), _sendable(of_gradient)


def _sendable(cast: Spec | None) -> Spec | None:
    scaled = cast is not None and cast.block == TENSOR and cast.zero_point == "none"
    return cast if scaled and cast.option("scale_rule", "absmax") == "absmax" else None  # type: ignore[union-attr]


def gathered(x: DTensor, cast: Spec | None) -> DTensor:
    """The whole of a sharded tensor on every rank, sent as `cast` says; gradients in high precision."""
    if cast is None or not x.placements[0].is_shard():
        return x.redistribute(placements=(Replicate(),))
    return _Gather.apply(x, cast)  # type: ignore[no-any-return, no-untyped-call]


def redistributed(y: DTensor, placements: tuple[Any, ...], cast: Spec | None) -> DTensor:
    """`y` with other placements; where its gradient is to be gathered, it is sent as `cast` says."""
    if cast is None or not placements[0].is_shard():
        return y.redistribute(placements=placements)
    return _GatherGradient.apply(y, placements, cast)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, cast: Spec) -> DTensor:
        ctx.placements = x.placements
        return _all_gather(x, cast)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return grad.redistribute(placements=ctx.placements), None


class _GatherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: DTensor, placements: tuple[Any, ...], cast: Spec) -> DTensor:
        ctx.cast = cast
        return y.redistribute(placements=placements)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None]:
        return gathered(grad, ctx.cast), None, None


def _all_gather(x: DTensor, cast: Spec) -> DTensor:
    """Cast the shards with the scale of the whole, send codes, and decode what came."""
    mesh, local = x.device_mesh, x.to_local()
    rows = local.reshape(-1, local.shape[-1])
    largest = all_reduce_max(block_absmax(rows, TENSOR).float(), [mesh.get_group()])
    codes = cast_shard(rows, cast, largest)
    sent = DTensor.from_local(
        codes.qdata.view(torch.uint8).reshape(local.shape),
        mesh,
        x.placements,
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )
    came = sent.redistribute(placements=(Replicate(),)).to_local()
    came = came.reshape(-1, x.shape[-1]).view(codes.qdata.dtype)
    whole = QTensor({"qdata": came, "scale": codes.scale}, codes.spec, tuple(came.shape), x.dtype)
    values = whole.dequantize().reshape(x.shape)
    return DTensor.from_local(values, mesh, (Replicate(),), run_check=False)
