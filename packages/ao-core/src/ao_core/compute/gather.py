"""FSDP2 for `ComputeWeight`: what the ranks exchange, and the weight that stands on it.

By default that is the memory in high precision. With the option `FLOAT8_ALL_GATHER` in the spec of the
output matmul it is the codes of the cast weight, which the gathered `ComputeWeight` then has in place of
memory, as a `QTensor` that needs no cast. That must not change any matmul, so both that read the weight
must cast it alike: the block of one is that of the other transposed, as for one scale per tensor or per
square. One scale per row (output matmul) needs one scale per column as well (gradient of the input). The
codes of both would take the bytes of bfloat16 again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ao_core.errors import ConfigError, UnsupportedOp
from ao_core.numerics import block_absmax, qparams_of_range, quant_max_of
from ao_core.registry import registry
from ao_core.spec import WHOLE, Spec, matrix_block
from ao_core.tensor import fsdp
from ao_core.tensor.create import quantize_values
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.sharding import local_shard

if TYPE_CHECKING:
    from ao_core.compute.matmuls import Matmuls
    from ao_core.compute.weight import ComputeWeight

__all__ = [
    "FLOAT8_ALL_GATHER",
    "GatherState",
    "all_reduce_max",
    "cast_shard",
    "materialize_transpose",
    "precompute_scales",
    "shared_cast",
    "with_float8_all_gather",
]

#: name of the option
FLOAT8_ALL_GATHER = "enable_fsdp_float8_all_gather"
#: options that say how a matmul is computed, nothing of how its operands are cast
_OF_MATMULS = ("fast_accum", FLOAT8_ALL_GATHER)


def with_float8_all_gather(matmuls: Matmuls) -> Matmuls:
    """The same matmuls for a `ComputeWeight` that FSDP2 gathers in the codes of its cast.

    Raises:
        ConfigError: the matmuls do not cast the weight alike, or not with symmetric scales that
            follow the largest magnitude.
    """
    _gathered_format(matmuls)
    output = matmuls.output
    assert output is not None
    options = tuple(sorted({**dict(output.options), FLOAT8_ALL_GATHER: True}.items()))
    return matmuls._replace(output=replace(output, options=options))


def shared_cast(first: Spec | None, second: Spec | None) -> Spec | None:
    """The cast that serves a matrix as `first` says and its transpose as `second` says, if one does."""
    if first is None or second is None:
        return None
    cast, other = _cast_of(first), _cast_of(second)
    return cast if cast == replace(other, block=other.block[::-1]) else None


def _cast_of(spec: Spec) -> Spec:
    """What a spec says of the cast of a matrix alone, its block as extents of rows and columns."""
    options = tuple(option for option in spec.options if option[0] not in _OF_MATMULS)
    return replace(spec, act=None, block=matrix_block(spec.block), options=options)


def _gathered_format(matmuls: Matmuls) -> Spec:
    """The format of the codes that serve both matmuls which read the weight."""
    cast = shared_cast(matmuls.output, matmuls.grad_input)
    if cast is None:
        raise ConfigError(
            f"{FLOAT8_ALL_GATHER}=True needs an output and a grad_input matmul that cast the weight "
            f"alike, in blocks that are each other's transpose (one scale for the tensor, or for a "
            f"square); found {matmuls.output} and {matmuls.grad_input}"
        )
    if cast.zero_point != "none" or cast.option("scale_rule", "absmax") != "absmax":
        raise ConfigError(
            f"{FLOAT8_ALL_GATHER}=True needs symmetric scales that follow the largest magnitude; "
            f"found {cast} with options {dict(cast.options)}"
        )
    return cast.in_layout("plain")


@dataclass
class GatherState:
    """What is known of the whole weight that shards are of."""

    #: the largest magnitude, float32 (1, 1), where it was found ahead of gathering
    largest: Tensor | None = None
    #: whether codes are gathered, as decided for the first time: FSDP2 keeps the buffers
    gathers_codes: bool | None = None


class Gathered(NamedTuple):
    """What one rank must know to put the gathered tensors together."""

    #: rows of the whole weight
    rows: int
    #: the cast shard, where codes travel
    codes: QTensor | None = None
    gather: fsdp.Gather | None = None


def pre_all_gather(
    shard: ComputeWeight, mesh: Any, size: tuple[int, ...], policy: Any
) -> tuple[tuple[Tensor, ...], Gathered]:
    """The plain tensors that all ranks exchange for one parameter of `size`.

    Memory is padded to the rows of the largest shard. Either way it is first rounded to the dtype of
    the mixed-precision policy.
    """
    memory = shard.memory.to(policy.param_dtype or shard.dtype)
    spec, ranks = shard.matmuls.output, mesh.size()
    rows = -(-size[0] // ranks)
    # a world of one exchanges nothing
    gathers_codes = ranks > 1 and spec is not None and bool(spec.option(FLOAT8_ALL_GATHER, False))
    if shard.gather_state.gathers_codes not in (None, gathers_codes):
        raise UnsupportedOp(
            f"the weight of {size} was gathered {'with' if not gathers_codes else 'without'} "
            f"{FLOAT8_ALL_GATHER} before, and FSDP2 keeps the buffers; change it before the first "
            "forward pass, or use the option for none of the layers that are to change"
        )
    shard.gather_state.gathers_codes = gathers_codes
    if not gathers_codes:
        padding = (0, 0) * (memory.dim() - 1) + (0, rows - memory.shape[0])
        return (F.pad(memory, padding),), Gathered(size[0])
    cast = _gathered_format(shard.matmuls)
    if memory.dim() != 2:
        raise UnsupportedOp(f"{FLOAT8_ALL_GATHER} is for matrices, not a weight of {tuple(size)}")
    extent = cast.block[0]
    if extent > 0 and rows % extent:
        raise UnsupportedOp(
            f"{FLOAT8_ALL_GATHER} with blocks of {extent} rows: a rank has {rows} rows of {size[0]}, "
            "which ends inside a block; use fewer ranks, a scale for the tensor, or leave the layer out"
        )
    if extent == WHOLE:
        codes = cast_shard(memory, cast, _largest(memory, cast, shard.gather_state, mesh))
    else:
        codes = quantize_values(memory, cast)
    outputs, gather = fsdp.pre_all_gather(codes, size, ranks)
    return outputs, Gathered(size[0], codes, gather)


def _largest(memory: Tensor, cast: Spec, state: GatherState, mesh: Any) -> Tensor:
    """The largest magnitudes in the blocks of all shards: found ahead, or by asking the other ranks."""
    own = block_absmax(memory, cast.block).float()
    if state.largest is None:
        return all_reduce_max(own, [mesh.get_group()])
    # it is of the memory in high precision; rounding keeps the order
    largest = state.largest.to(memory.dtype).float()
    torch._assert_async(
        (own > largest).logical_not().all(),
        "a weight has grown since its scale was precomputed: precompute after every change",
    )
    return largest


def cast_shard(shard: Tensor, spec: Spec, largest: Tensor) -> QTensor:
    """A shard, quantized by the scales of the whole weight.

    Args:
        shard: this rank's rows of the weight.
        spec: the format, with symmetric scales.
        largest: the largest magnitude of the whole weight in each block, float32, one per block.
    """
    dtype, mode = registry.dtypes.get(spec.dtype), str(spec.option("mx_mode", "floor"))
    kind, quant_max = spec.chosen_scale_dtype, quant_max_of(dtype, spec.block)
    scale, _ = qparams_of_range(
        -largest, largest, dtype, "none", kind, mx_mode=mode, quant_max=quant_max
    )
    return quantize_values(shard, spec, scale=scale)


def all_reduce_max(largest: Tensor, groups: Iterable[Any]) -> Tensor:
    """The greatest of non-negative values over the ranks of all groups; NaN is the greatest of all.

    Args:
        largest: float32, of the same shape on each rank, without negative values.
        groups: process groups of torch.distributed, reduced one after the other.
    """
    bits = largest.contiguous().view(torch.int32).clone()  # which are in the order of the values
    for group in groups:
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)


def post_all_gather(
    shard: ComputeWeight, outputs: tuple[Tensor, ...], gathered: Gathered, out: Any
) -> Any:
    """The whole weight around the gathered tensors; with `out`, what it holds is filled again."""
    codes, gather = gathered.codes, gathered.gather
    local = local_shard(out)
    if local is not None:
        local.matmuls = shard.matmuls  # which may have been put back to high precision
    if codes is None or gather is None:
        return None if out is not None else (shard.like(outputs[0][: gathered.rows]), outputs)
    if local is not None:
        return fsdp.post_all_gather(codes, outputs, gather, codes.dtype, local.memory)
    whole, inner = fsdp.post_all_gather(codes, outputs, gather, codes.dtype, None)
    return shard.like(whole), inner


def materialize_transpose(matrix: QTensor) -> QTensor:
    """The same values stored as they are shown: codes and scales of a transposed matrix turned."""
    if not matrix.is_permuted:
        return matrix
    parts = {name: part.t().contiguous() for name, part in matrix.parts.items()}
    spec = replace(matrix.spec, block=matrix.spec.block[::-1])
    return QTensor(parts, spec, tuple(matrix.shape), matrix.dtype)


def precompute_scales(parameters: Iterable[Tensor]) -> None:
    """Find the largest magnitude of every sharded weight whose codes FSDP2 gathers, all at once.

    One all-reduce instead of one per weight and gather. The result holds until the next call, so
    call it after every step of the optimizer: to gather weights that have grown since is an error.
    Weights with other than one scale for the tensor need none.
    """
    by_mesh: defaultdict[Any, list[ComputeWeight]] = defaultdict(list)
    for parameter in parameters:
        local = local_shard(parameter)
        spec = (
            local.matmuls.output if local is not parameter and hasattr(local, "matmuls") else None
        )
        if spec and spec.option(FLOAT8_ALL_GATHER, False) and spec.block == (WHOLE, WHOLE):
            by_mesh[parameter.device_mesh].append(local)  # type: ignore[attr-defined]
    for mesh, weights in by_mesh.items():
        found = torch.stack([block_absmax(w.memory, (WHOLE, WHOLE)).float() for w in weights])
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        for weight, largest in zip(weights, all_reduce_max(found, groups), strict=True):
            weight.gather_state.largest = largest
