"""Matmuls written with `torch.matmul` and its kin, under transforms; see `transforms`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core.tensor.matmuls import is_transposed_weight, select_linear
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.tables import function
from ao_core.tensor.transforms import (
    is_transforming,
    refuse_quantized_activations,
    transformed_linear,
)

__all__: list[str] = []


def _transposing(func: Any) -> Any:
    """The transposed weight as it is, where transforms would wrap it: none differentiates it."""

    def transpose(w: Any, *args: Any, **kwargs: Any) -> Any:
        if type(w) is not QTensor or w.requires_grad or not is_transforming():
            return NotImplemented
        with torch._C._DisableFuncTorch(), torch._C.DisableTorchFunctionSubclass():
            return func(w, *args, **kwargs)

    return transpose


_PROPERTIES = (Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
for _func in (Tensor.t, torch.t, Tensor.transpose, torch.transpose, *_PROPERTIES):
    function(_func)(_transposing(_func))


@function(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def _matmul_fast(*args: Any, **kwargs: Any) -> Any:
    """``x @ w.T`` under transforms, as `F.linear`."""
    if kwargs or len(args) != 2 or not is_transposed_weight(args[1]) or not is_transforming():
        return NotImplemented
    x, w = args
    if type(x) is not Tensor or w.requires_grad or x.dim() == 0:
        return NotImplemented
    return transformed_linear(x, w.t(), None, select_linear)


@function(torch.addmm, Tensor.addmm)
def _addmm_fast(*args: Any, **kwargs: Any) -> Any:
    if len(args) != 3 or type(args[0]) is not Tensor or args[0].dim() != 1:
        return NotImplemented
    out = _matmul_fast(*args[1:], **kwargs)
    return out if out is NotImplemented else out + args[0]


@function(torch.bmm, Tensor.bmm, torch._grouped_mm, F.grouped_mm)
def _bmm_fast(*args: Any, **kwargs: Any) -> Any:
    for w in (*args, *kwargs.values()):
        if isinstance(w, QTensor):
            refuse_quantized_activations("a matmul with the weights of experts", w)
    return NotImplemented
