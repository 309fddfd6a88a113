"""Adapters that begin with what quantization lost: LoftQ and PiSSA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ao_core.ext import ConfigError
from ao_core.ext.numerics import sqnr
from ao_core.ext.quantizing import Progress, watched
from ao_hf.peft.layer import QuantizedLoraLinear
from ao_hf.peft.originals import Originals, reader
from ao_hf.peft.variants import QALora
from ao_hf.peft.weights import dense, requantized

__all__ = [
    "InitRecord",
    "adapted_layers",
    "best_of_rank",
    "initialize_adapters_",
    "initialize_layer_",
]

_METHODS = ("loftq", "pissa")


@dataclass(frozen=True)
class InitRecord:
    """How near a layer is to the original weight W, in dB of signal to error."""

    #: of the layer, in the base model
    name: str
    #: the quantized weight alone, as it was
    before_db: float
    #: the quantized weight with the adapter
    after_db: float


@torch.no_grad()
def initialize_adapters_(
    model: nn.Module,
    originals: Originals,
    method: str = "loftq",
    *,
    steps: int = 1,
    adapter_name: str = "default",
    progress: Progress = None,
) -> list[InitRecord]:
    """Let adapters begin with what is missing between the quantized and the original weights, in place.

    "loftq" (Li et al. 2023, arXiv:2310.08659): sBA is the best matrix of its rank for W - Q, where Q is the
    quantized weight. With `steps` > 1, Q is then quantized anew from W - sBA, and so on; of all steps the
    nearest to W is kept. With one step the codes stay as they are.
    "pissa" (Meng et al. 2024, arXiv:2404.02948): sBA is the best matrix of its rank for W itself, and the
    rest is quantized anew.

    Args:
        model: what `get_peft_model` made with `over_quantized`. Nothing is merged.
        originals: the weights before quantization: a mapping of names, a module, or the folder of a
            checkpoint, from which one weight at a time is read.
        method: "loftq" or "pissa".
        steps: of LoftQ, positive.
        adapter_name: the adapter.
        progress: True for a bar, or a function called with (done, total, name).

    Returns:
        A record for each layer.

    Raises:
        ConfigError: another method; no layer has such an adapter; an original is missing or of another
            shape; an adapter of QA-LoRA, which is one number for each group; or a merged one.
    """
    if method not in _METHODS:
        raise ConfigError(f"method={method!r} is unknown; use one of {', '.join(_METHODS)}")
    if steps < 1:
        raise ConfigError(f"steps={steps}: use a positive number")
    layers = [(n, m) for n, m in adapted_layers(model) if adapter_name in m.lora_A]
    if not layers:
        raise ConfigError(
            f"adapter_name={adapter_name!r}: no quantized layer has such an adapter; pass "
            "over_quantized(config) to get_peft_model"
        )
    for name, layer in layers:
        if layer.merged or isinstance(layer.lora_variant.get(adapter_name), QALora):
            why = "has merged adapters" if layer.merged else "has an adapter of QA-LoRA"
            raise ConfigError(f"layer {name!r} {why}, which cannot be initialized from an error")
    read = reader(originals, getattr(model, "base_model_prefix", ""))
    records = []
    for name, layer in watched(layers, [name for name, _ in layers], progress, method):
        records.append(
            InitRecord(
                name, *initialize_layer_(layer, adapter_name, read(f"{name}.weight"), method, steps)
            )
        )
    return records


@torch.no_grad()
def initialize_layer_(
    layer: QuantizedLoraLinear, adapter_name: str, original: Tensor, method: str, steps: int = 1
) -> tuple[float, float]:
    """Set one adapter, and the weight under it; returns dB of the weight alone, and with the adapter."""
    weight, scaling = layer.unmerged_weight, layer.scaling[adapter_name]
    a, b = layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight
    if original.shape != weight.shape:
        raise ConfigError(
            f"an original has the shape {tuple(original.shape)}, its layer {tuple(weight.shape)}"
        )
    wanted = original.detach().to(weight.device, torch.float32)
    before = float(sqnr(wanted, dense(weight)))
    rank = a.shape[0]
    found = (
        _pissa(weight, wanted, rank) if method == "pissa" else _loftq(weight, wanted, rank, steps)
    )
    if found.weight is not None:
        weight.data = found.weight
    # each of the two takes half of what the scaling will multiply by
    b.data.copy_(found.b / scaling**0.5)
    a.data.copy_(found.a / scaling**0.5)
    if adapter_name in layer.lora_magnitude_vector:
        layer.lora_magnitude_vector[adapter_name].update_layer(
            base_layer=layer.get_base_layer(), lora_A=a, lora_B=b, scaling=scaling
        )
    return before, found.db


class _Found(NamedTuple):
    """A weight, or None for the one there was, and the matrices whose matmul is added to it."""

    weight: Tensor | None
    b: Tensor
    a: Tensor
    #: of their sum, beside the original
    db: float


def _pissa(weight: Tensor, wanted: Tensor, rank: int) -> _Found:
    b, a = best_of_rank(wanted, rank)
    made = requantized(weight, wanted - b @ a)
    return _Found(made, b, a, float(sqnr(wanted, dense(made) + b @ a)))


def _loftq(weight: Tensor, wanted: Tensor, rank: int, steps: int) -> _Found:
    """The best of so many steps."""
    tried: list[_Found] = []
    for _ in range(steps):
        made = requantized(weight, wanted - tried[-1].b @ tried[-1].a) if tried else None
        values = dense(weight if made is None else made)
        b, a = best_of_rank(wanted - values, rank)
        tried.append(_Found(made, b, a, float(sqnr(wanted, values + b @ a))))
    return max(tried, key=lambda found: found.db)


def best_of_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B (N, rank) and A (rank, K) whose matmul is nearest to a matrix (N, K); both have the same norms.

    By the eigenvectors of the smaller Gram matrix, in float64. Where the rank of the matrix is less, the
    others are zeros.
    """
    wide = matrix.double()
    turned = wide.shape[0] > wide.shape[1]
    wide = wide.t() if turned else wide
    _, vectors = torch.linalg.eigh(wide @ wide.t())
    left = vectors.flip(1)[:, :rank]
    right = left.t() @ wide
    sizes = right.norm(dim=1).sqrt()
    inverse = torch.where(sizes > 0, 1 / sizes, 0.0)
    missing = rank - left.shape[1]
    b = nn.functional.pad(left * sizes, (0, missing)).float()
    a = nn.functional.pad(right * inverse[:, None], (0, 0, 0, missing)).float()
    return (a.t(), b.t()) if turned else (b, a)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLoraLinear]]:
    """The layers with adapters over quantized weights, by their names in the base model."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLoraLinear):
            yield name.removeprefix("base_model.model."), module
