"""Low-rank corrections of quantized weights in closed form: EoRA and QERA."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ao_core import FqnToConfig, QTensor
from ao_core.ext import ConfigError, checked_but, is_conv, is_transposed
from ao_core.ext.calibration import (
    HESSIAN,
    Data,
    Inputs,
    batches_of,
    best_of_rank,
    output_error,
    replaced,
    unobservable,
    visit,
)
from ao_core.ext.quantizing import Decision, Progress, decide

__all__ = ["LowRank", "low_rank_corrections"]


@dataclass(frozen=True)
class LowRank:
    """B A, which is added to a quantized weight: outputs are x (Ŵ + B A)ᵀ."""

    #: (out, rank), float32
    b: Tensor
    #: (rank, in), float32
    a: Tensor
    #: rows of data that its layer saw
    rows: int
    #: squared error of the layer's outputs on the data with the quantized weight alone, and with B A
    error_before: float
    error_after: float


@checked_but("data")
@torch.no_grad()
def low_rank_corrections(
    model: nn.Module,
    originals: Mapping[str, Tensor] | nn.Module,
    data: Data,
    rank: int = 16,
    *,
    progress: Progress = None,
) -> dict[str, LowRank]:
    """The B A of a rank that bring the outputs of each quantized layer nearest to the original ones.

    With E = W - Ŵ and H = Σ x xᵀ = L Lᵀ of the inputs, tr((E - B A) H (E - B A)ᵀ) is least for
    B A = SVD_r(E L) L⁻¹, and what remains is the sum of the other squared singular values. Inputs are those
    that the corrected layers before make. The model is not changed; `ao_hf.peft.save_adapter` writes the
    result as an adapter that PEFT loads.

    References: EoRA, Liu et al. 2024, arXiv:2410.21271; QERA, Zhang et al. 2024, arXiv:2410.06040.

    Args:
        model: quantized. Linear layers are corrected; memory holds their dense values meanwhile.
        originals: the weights before quantization, by name, or the module that has them.
        data: batches, as for `quantize_`.
        rank: positive. The columns that a smaller matrix does not need are zeros.
        progress: True for a bar, or a function called with (done, total, name).

    Returns:
        By the names of the weights, in the order in which data reaches them.

    Raises:
        ConfigError: the rank is not positive, no linear layer is quantized, an original is missing or of
            another shape, or there is no data.
        QuantizationError: inputs of a layer have NaN or inf.
    """
    if rank < 1:
        raise ConfigError(f"rank={rank!r}: must be positive, e.g. 16")
    batches = batches_of(data, "low_rank_corrections")
    if isinstance(originals, nn.Module):
        originals = dict(originals.named_parameters(remove_duplicate=False))
    entries = [each for each in decide(model, FqnToConfig({"*": None}), None) if _is_layer(each)]
    if not entries:
        raise ConfigError(
            "model has no linear layer with a quantized weight; call quantize_ before"
        )
    wanted = {each.fqn: _original(each, originals) for each in entries}
    found: dict[str, LowRank] = {}

    def rewrite(entry: Decision, inputs: Inputs) -> Tensor:
        values = entry.tensor.detach().double()
        error = wanted[entry.fqn].to(values) - values
        hessian = inputs.statistics[0]["hessian"]
        b, a = best_of_rank(error, rank, hessian)
        product = b.double() @ a.double()
        errors = [output_error(each, hessian) for each in (error, error - product)]
        found[entry.fqn] = LowRank(b, a, inputs.rows, *errors)
        return (values + product).to(entry.tensor.dtype)

    with ExitStack() as stack:
        for entry in entries:
            q = entry.tensor
            assert isinstance(q, QTensor)
            stack.enter_context(replaced([(entry.owners, q.dequantize())]))
        visit(
            model,
            batches,
            entries,
            lambda _: (HESSIAN,),
            rewrite,
            progress=progress,
            what="low rank",
        )
    return found


def _is_layer(entry: Decision) -> bool:
    tensor, owner = entry.tensor, entry.owners[0]
    is_weight = tensor.dim() == 2 and not is_conv(tensor, owner) and not is_transposed(owner)
    return isinstance(tensor, QTensor) and is_weight and unobservable(entry) is None


def _original(entry: Decision, originals: Mapping[str, Tensor]) -> Tensor:
    names = [owner.fqn for owner in entry.owners if owner.fqn in originals]
    if not names:
        raise ConfigError(f"originals has no {entry.fqn!r}, which the model has quantized")
    original = originals[names[0]].detach()
    if original.shape != entry.tensor.shape:
        shapes = f"{tuple(original.shape)}, and the model {tuple(entry.tensor.shape)}"
        raise ConfigError(f"originals has {names[0]!r} of the shape {shapes}")
    return original
