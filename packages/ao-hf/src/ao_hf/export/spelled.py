"""Quantized linear layers spelled out in the quantization ops of torch, which other runtimes know.

The ops are those of torch's own namespace `quantized_decomposed`:

- the weight: `dequantize_per_channel`, or `dequantize_per_channel_group` for groups along a row;
- activations: `choose_qparams_per_token_asymmetric`, `quantize_per_token` and `dequantize_per_token`. Their
  symmetric scales are not those of ao (which uses 127.5 steps and not 127), so that kind is refused.

A compiler finds these patterns around a linear layer and takes its own matmul of integers: XNNPACK in
ExecuTorch does. Executed one by one in eager mode they give the values of the quantized model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the ops
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import QTensor
from ao_core.ext import ROW, UnsupportedOp, is_converted, registry
from ao_core.ext.kernels import unpack_parts

__all__ = ["CodeFormat", "SpelledLinear", "spell_linears", "unspellable"]

#: what activations can be: dtype, zero point, block, static
_TOKENS = ("uint8", "int", ROW, False)
ops: Any = torch.ops.quantized_decomposed


@dataclass(frozen=True)
class CodeFormat:
    """The integers of a weight: stored one by one as int8, or as uint8 where they are unsigned."""

    bits: int
    low: int
    high: int
    #: elements of a row that share a scale; None: all of the row
    group: int | None
    #: whether there are zero points
    has_zero_point: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that holds the codes."""
        return torch.int8 if self.low < 0 else torch.uint8


class SpelledLinear(nn.Module):
    """A linear layer of codes, scales and zero points, without tensor subclasses."""

    #: codes (N, K), as `format` says
    codes: Tensor
    #: float32, (N,) or (N, K / group)
    scale: Tensor
    #: int32 like `scale`; compilers want zeros too where there is none
    zero_point: Tensor
    bias: Tensor | None

    def __init__(self, weight: QTensor, bias: Tensor | None) -> None:
        super().__init__()
        if reason := unspellable(weight):
            raise UnsupportedOp(f"a weight of {weight.spec}: {reason}")
        codes, scale, zero_point = unpack_parts(weight.parts, weight.spec, weight.stored_shape)
        self.format = _code_format(weight)
        #: whether activations are quantized, with a scale and a zero point for each token
        self.quantizes_activations = weight.spec.act is not None
        assert scale is not None  # of integers
        shape = scale.shape[:1] if self.format.group is None else scale.shape
        self.register_buffer("codes", _integers(codes, weight).contiguous())
        self.register_buffer("scale", scale.float().reshape(shape).contiguous())
        points = torch.zeros_like(scale) if zero_point is None else zero_point
        self.register_buffer("zero_point", points.to(torch.int32).reshape(shape))
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        if self.quantizes_activations:
            x = _fake_quantize(x)
        return F.linear(x, self.dequantized_weight(x.dtype), self.bias)

    def dequantized_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight (N, K), by one op."""
        form = self.format
        span = (form.low, form.high, form.dtype)
        if form.group is None:
            points = self.zero_point
            dense = ops.dequantize_per_channel(self.codes, self.scale, points, 0, *span)
        else:
            dense = ops.dequantize_per_channel_group(
                self.codes, self.scale, self.zero_point, *span, form.group, torch.float32
            )
        weight: Tensor = dense if dtype == torch.float32 else dense.to(dtype)
        return weight

    def extra_repr(self) -> str:
        """Sizes and format."""
        rows, columns = self.codes.shape
        return f"{columns}, {rows}, bias={self.bias is not None}, {self.format}"


def spell_linears(model: nn.Module) -> nn.Module:
    """A copy of a model in which quantized linear layers are spelled out; all other tensors are shared.

    Args:
        model: whose quantized tensors are all weights of `nn.Linear`; it is left as it is.

    Raises:
        UnsupportedOp: a tensor is quantized in a way that these ops do not express; names each.
    """
    problems = _problems(model)
    if problems:
        raise UnsupportedOp(
            f"these cannot be spelled in quantization ops of torch: {'; '.join(problems)}. Use "
            "another recipe, or keep them in high precision with an FqnToConfig"
        )
    held = {id(t): t for t in (*model.parameters(), *model.buffers())}
    spelled = copy.deepcopy(model, held)
    made: dict[nn.Module, SpelledLinear] = {}
    # a layer that a model holds twice stays one
    for name, module in list(spelled.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Linear) and isinstance(module.weight, QTensor):
            if module not in made:
                made[module] = SpelledLinear(module.weight, module.bias)
                made[module].train(module.training)
            if not name:
                return made[module]
            parent, _, child = name.rpartition(".")
            setattr(spelled.get_submodule(parent), child, made[module])
    return spelled


def _problems(model: nn.Module) -> list[str]:
    problems = []
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            fqn = f"{name}.{own}" if name else own
            if not is_converted(parameter):
                continue
            if not isinstance(parameter, QTensor):
                problems.append(
                    f"{fqn} is a {type(parameter).__name__}, multiplied in low precision"
                )
            elif type(module) is not nn.Linear or own != "weight":
                problems.append(f"{fqn} belongs to {type(module).__name__}, which is no nn.Linear")
            elif reason := unspellable(parameter):
                problems.append(f"{fqn} ({parameter.spec}): {reason}")
    return problems


def unspellable(weight: QTensor) -> str | None:
    """None, or why the ops do not express a product with this weight."""
    spec = weight.spec
    if weight.format.kind != "int":
        return f"{spec.dtype} is no integer format"
    if weight.is_permuted or weight.dim() != 2:
        return "it is transposed, or no matrix"
    if not weight.layout_record.affine or spec.zero_point not in ("none", "int"):
        return f"zero_point={spec.zero_point!r}; use 'none' or 'int'"
    if spec.input:
        return "activations go through input steps first"
    rows, columns = (1, *spec.block)[-2:]
    if rows != 1 or (columns != ROW[1] and (weight.shape[1] % columns or columns == 1)):
        return (
            f"block={spec.block}: one scale per row, or whole groups of {weight.shape[1]} columns"
        )
    act = spec.act
    if act is not None and (act.dtype, act.zero_point, act.block, act.static) != _TOKENS:
        return f"act=({act}): activations need uint8 codes, one scale and one zero point for each token"
    return None


def _code_format(weight: QTensor) -> CodeFormat:
    form, columns = weight.format, weight.spec.block[-1]
    group = None if columns in (ROW[1], weight.shape[1]) else columns
    has_zero_point = weight.spec.zero_point == "int"
    return CodeFormat(form.bits, int(form.min), int(form.max), group, has_zero_point)


def _integers(codes: Tensor, weight: QTensor) -> Tensor:
    """The integers that codes stand for."""
    dtype = registry.dtypes.get(weight.spec.dtype)
    storage = torch.int8 if dtype.min < 0 else torch.uint8
    return dtype.decode(codes.view(torch.uint8)).to(storage)


def _fake_quantize(x: Tensor) -> Tensor:
    """Activations rounded to 8 bits, with one scale and one zero point for each token."""
    scale, zero_point = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
    codes = ops.quantize_per_token(x, scale, zero_point, -128, 127, torch.int8)
    return ops.dequantize_per_token(  # type: ignore[no-any-return]
        codes, scale, zero_point, -128, 127, torch.int8, x.dtype
    )
