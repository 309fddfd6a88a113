"""Adapters that begin with what quantization lost: LoftQ and PiSSA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ao_core.ext import ConfigError
from ao_core.ext.calibration import Data, best_of_rank
from ao_core.ext.numerics import sqnr
from ao_core.ext.quantizing import Progress, watched
from ao_hf.peft.layer import QuantizedLoraLinear
from ao_hf.peft.moments import input_moments, portions
from ao_hf.peft.originals import Originals, reader
from ao_hf.peft.variants import QALora
from ao_hf.peft.weights import dense, requantized

__all__ = [
    "InitRecord",
    "adapted_layers",
    "initialize_adapters_",
    "initialize_layer_",
]

_METHODS = ("loftq", "pissa")


@dataclass(frozen=True)
class InitRecord:
    """How near a layer is to the original, in dB of signal to error."""

    #: of the layer, in the base model
    name: str
    #: the quantized weight alone, as it was
    before_db: float
    #: the quantized weight with the adapter
    after_db: float
    #: whose error it is: "weights", or "outputs" where data reached the layer
    of: str = "weights"


@torch.no_grad()
def initialize_adapters_(
    model: nn.Module,
    originals: Originals,
    method: str = "loftq",
    *,
    steps: int = 1,
    data: Data | None = None,
    adapter_name: str = "default",
    progress: Progress = None,
) -> list[InitRecord]:
    """Let adapters begin with what is missing between the quantized and the original weights, in place.

    "loftq" (Li et al. 2023, arXiv:2310.08659): sBA is the best matrix of its rank for W - Q, where Q is the
    quantized weight. With `steps` > 1, Q is then quantized anew from W - sBA, and so on; of all steps the
    nearest to W is kept. With one step the codes stay as they are.
    "pissa" (Meng et al. 2024, arXiv:2404.02948): sBA is the best matrix of its rank for W itself, and the
    rest is quantized anew.

    With `data`, the best matrix is that with the least error of the layer's outputs on the data, not of the
    weights: QERA (Zhang et al. 2024, arXiv:2410.06040). Inputs are those of the model as it is. Where the
    moments of all layers would take more than 2 GiB, the data is run once for each portion of the layers, and
    later portions see inputs that the adapters of earlier ones have changed. Layers that the data does not
    reach, as experts may be, begin as without data; their records say so.

    Args:
        model: what `get_peft_model` made with `over_quantized`. Nothing is merged.
        originals: the weights before quantization: a mapping of names, a module, or the folder of a
            checkpoint, from which one weight at a time is read.
        method: "loftq" or "pissa".
        steps: of LoftQ, positive.
        data: batches, as for `quantize_`: a few thousand tokens of the kind that the model is trained on.
        adapter_name: the adapter.
        progress: True for a bar, or a function called with (done, total, name).

    Returns:
        A record for each layer.

    Raises:
        ConfigError: another method; no layer has such an adapter; an original is missing or of another
            shape; an adapter of QA-LoRA, which is one number for each group, or a merged one; the model
            cannot be called with the data.
        QuantizationError: inputs of a layer have NaN or inf.
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
    bar = watched(layers, [name for name, _ in layers], progress, method)
    for portion in portions(layers) if data is not None else [layers]:
        moments = {} if data is None else input_moments(model, portion, data)
        for name, layer in islice(bar, len(portion)):
            by = moments.pop(name, None)
            found = initialize_layer_(
                layer, adapter_name, read(f"{name}.weight"), method, steps, by
            )
            records.append(InitRecord(name, *found, "weights" if by is None else "outputs"))
    return records


@torch.no_grad()
def initialize_layer_(
    layer: QuantizedLoraLinear,
    adapter_name: str,
    original: Tensor,
    method: str,
    steps: int = 1,
    moments: Tensor | None = None,
) -> tuple[float, float]:
    """Set one adapter, and the weight under it; returns dB of the weight alone, and with the adapter."""
    weight, scaling = layer.unmerged_weight, layer.scaling[adapter_name]
    a, b = layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight
    if original.shape != weight.shape:
        raise ConfigError(
            f"an original has the shape {tuple(original.shape)}, its layer {tuple(weight.shape)}"
        )
    wanted = original.detach().to(weight.device, torch.float32)
    goal = _Goal(wanted, a.shape[0], None if moments is None else moments.to(weight.device))
    before = goal.db(dense(weight))
    found = _pissa(weight, goal) if method == "pissa" else _loftq(weight, goal, steps)
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


class _Goal(NamedTuple):
    """What a weight with its adapter should be near to."""

    #: (N, K)
    wanted: Tensor
    rank: int
    #: of the inputs, (K, K); None: all errors of weights count alike
    moments: Tensor | None

    def best(self, missing: Tensor) -> tuple[Tensor, Tensor]:
        """B and A for what is missing."""
        return best_of_rank(missing, self.rank, self.moments)

    def db(self, values: Tensor) -> float:
        """Signal to error of weights, or of the outputs."""
        if self.moments is None:
            return float(sqnr(self.wanted, values))
        signal, error = self.wanted.double(), (self.wanted - values).double()
        powers = [((w @ self.moments) * w).sum() for w in (signal, error)]
        return float(10 * (powers[0] / powers[1]).log10())


class _Found(NamedTuple):
    """A weight, or None for the one there was, and the matrices whose matmul is added to it."""

    weight: Tensor | None
    b: Tensor
    a: Tensor
    #: of their sum, compared with the original
    db: float


def _pissa(weight: Tensor, goal: _Goal) -> _Found:
    b, a = goal.best(goal.wanted)
    made = requantized(weight, goal.wanted - b @ a)
    return _Found(made, b, a, goal.db(dense(made) + b @ a))


def _loftq(weight: Tensor, goal: _Goal, steps: int) -> _Found:
    """The best of so many steps."""
    tried: list[_Found] = []
    for _ in range(steps):
        made = requantized(weight, goal.wanted - tried[-1].b @ tried[-1].a) if tried else None
        values = dense(weight if made is None else made)
        b, a = goal.best(goal.wanted - values)
        tried.append(_Found(made, b, a, goal.db(values + b @ a)))
    return max(tried, key=lambda found: found.db)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLoraLinear]]:
    """The layers with adapters over quantized weights, by their names in the base model."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLoraLinear):
            yield name.removeprefix("base_model.model."), module
