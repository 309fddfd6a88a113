"""How much an algorithm's weight changes the outputs of its layer, compared with rounding to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from ao_core.calibration.hessian import output_error
from ao_core.calibration.matrices import matrices
from ao_core.calibration.stepping import stepped_weight
from ao_core.calibration.visit import Inputs
from ao_core.quantize import transformed
from ao_core.records import Skip
from ao_core.targets import Decision
from ao_core.tensor import QTensor

__all__ = ["error_vs_rtn"]

#: rows of a matrix whose errors stand for all
_ERROR_ROWS = 256


def error_vs_rtn(entry: Decision, dense: Tensor, new: Tensor, inputs: Inputs) -> float | None:
    """The squared error of the outputs over that of rounding to nearest; None where it is not known."""
    if entry.config is None:
        return None
    nearest = transformed(entry, dense)
    if isinstance(nearest, Skip):
        return None
    errors = [_output_error(entry, dense, each, inputs) for each in (new, nearest)]
    if errors[0] is None or not errors[1]:
        return None
    return errors[0] / errors[1]


def _output_error(entry: Decision, dense: Tensor, new: Tensor, inputs: Inputs) -> float | None:
    """tr(Δ H Δᵀ) of some rows of all matrices, Δ being the change of the weight.

    With the diagonal of H if that is all that is known.
    """
    values = new.dequantize() if isinstance(new, QTensor) else new
    wide = torch.promote_types(dense.dtype, torch.float32)
    now, before = (
        stepped_weight(entry, w.detach().to(dense.device, wide)) for w in (values, dense)
    )
    change = now - before
    change = matrices(change, entry.owners[0])
    # rows that are spread evenly say as much of large weights as all, in a fraction of the time
    change = change[:, :: -(-change.shape[1] // _ERROR_ROWS)].double()
    total = 0.0
    for delta_NK, each in zip(change, inputs.statistics, strict=True):
        keys = each.values
        if "hessian" in keys:
            total += output_error(delta_NK, keys["hessian"])
        elif "squares" in keys:
            total += float((delta_NK.square() @ keys["squares"]).sum())
        else:
            return None
    return total
