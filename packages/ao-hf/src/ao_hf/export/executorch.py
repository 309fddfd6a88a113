"""Programs for ExecuTorch, whose quantized linear layers run in XNNPACK.

`spell_for_xnnpack` writes linear layers in the ops that XNNPACK's partitioner matches, and needs torch alone.
`export_executorch` lowers such a model with the package executorch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_core.ext import MissingExtraError, UnsupportedOp, checked
from ao_hf.export.spelled import SpelledLinear, spell_linears

__all__ = ["Lowered", "export_executorch", "spell_for_xnnpack"]

#: XNNPACK reads groups in multiples of this
_GROUP = 32
_DELEGATE = "executorch_call_delegate"
#: what a linear layer leaves in a graph where no delegate took it
_OF_LINEAR = ("quantize", "qparams", "linear", "mm.default", "addmm.default")


@dataclass(frozen=True)
class Lowered:
    """What became of a model."""

    #: bytes of the program
    nbytes: int
    #: pieces of the graph that XNNPACK runs
    delegates: int
    #: ops of linear layers that ExecuTorch runs itself, one by one, and how often they occur
    left: Mapping[str, int]


def spell_for_xnnpack(model: nn.Module) -> nn.Module:
    """A copy of a model with quantized linear layers as XNNPACK wants them; other tensors are shared.

    Supported are int8 weights with one scale per row, alone or with `int8` activations with zero points, and
    with such activations int4 weights with one scale per row or per group of a multiple of 32 columns. All
    weights are symmetric. The recipes are `int8_weight_only`,
    `int8_dynamic_activation_int8_weight/asymmetric` and `int8_dynamic_activation_int4_weight`.

    XNNPACK has no matmul for int8 weights alone. ExecuTorch then dequantizes them at each call, and
    XNNPACK multiplies in float32: such a program is small, and not faster.

    Raises:
        UnsupportedOp: XNNPACK has no matmul for a weight; names each.
    """
    spelled = spell_linears(model)
    problems = [
        f"{name}.weight: {reason}"
        for name, module in spelled.named_modules()
        if isinstance(module, SpelledLinear) and (reason := _refused(module))
    ]
    if problems:
        raise UnsupportedOp(
            f"XNNPACK has no matmul for these: {'; '.join(problems)}. Use int8_weight_only, "
            "int8_dynamic_activation_int8_weight/asymmetric or int8_dynamic_activation_int4_weight"
        )
    return spelled


def _refused(layer: SpelledLinear) -> str | None:
    form = layer.format
    if form.has_zero_point or form.low >= 0:
        return "its weight has zero points; use symmetric integers"
    if form.bits not in (4, 8):
        return f"its weight has {form.bits} bits; use 4 or 8"
    if form.bits == 8 and form.group is not None:
        return f"int8 with groups of {form.group}; use one scale per row"
    if form.bits == 4 and not layer.quantizes_activations:
        return "int4 weights need quantized activations"
    if form.group is not None and form.group % _GROUP:
        return f"groups of {form.group}; use a multiple of {_GROUP}"
    return None


@checked
def export_executorch(
    model: nn.Module,
    inputs: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | None = None,
) -> Lowered:
    """Write a quantized model as a program (.pte) of ExecuTorch, for CPUs through XNNPACK.

    Args:
        model: in eval mode and float32; a language model of transformers goes into a `LogitsModel` first.
        inputs: an example, as for `torch.export.export`.
        path: the file to write.
        dynamic_shapes: as for `torch.export.export`.

    Raises:
        MissingExtraError: executorch is not installed.
        UnsupportedOp: XNNPACK has no matmul for a weight.
    """
    spelled = spell_for_xnnpack(model)
    try:
        # registers kernels that the program may need
        import_module("executorch.kernels.quantized")
        from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    except ImportError as error:
        raise MissingExtraError("executorch", "ao-hf[executorch]", "export_executorch") from error

    layers = [module for module in spelled.modules() if isinstance(module, SpelledLinear)]
    kinds = [ConfigPrecisionType.FP32]
    if any(layer.quantizes_activations for layer in layers):
        # first: the other one would take these linear layers too, and run them in float32
        kinds.insert(0, ConfigPrecisionType.DYNAMIC_QUANT)
    with torch.no_grad():
        program = torch.export.export(spelled, inputs, dynamic_shapes=dynamic_shapes)
        edge = to_edge_transform_and_lower(
            program,
            partitioner=[XnnpackPartitioner(config_precisions=kind) for kind in kinds],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
    found = Counter(
        node.target.__name__
        for node in edge.exported_program().graph.nodes
        if node.op == "call_function"
    )
    buffer = edge.to_executorch().buffer
    Path(path).write_bytes(buffer)
    left = {name: n for name, n in found.items() if any(part in name for part in _OF_LINEAR)}
    return Lowered(len(buffer), found[_DELEGATE], left)
