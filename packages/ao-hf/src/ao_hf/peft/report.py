"""What merging adapters into quantized weights costs, known before anything is merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ao_core.ext import ConfigError
from ao_core.ext.numerics import sqnr
from ao_core.ext.reports import aligned
from ao_hf.peft.initialize import adapted_layers
from ao_hf.peft.originals import Originals, reader
from ao_hf.peft.weights import dense

__all__ = ["MergeRecord", "MergeReport", "merge_report"]


@dataclass(frozen=True)
class MergeRecord:
    """One layer; ratios of signal to error in dB, inf where there is no error."""

    #: of the layer, in the base model
    name: str
    adapters: tuple[str, ...]
    #: the merged weight, compared with the exact sum of weight and adapters
    sqnr_db: float
    #: the merged weight less the quantized weight alone, compared with what the adapters add: below 0 more
    #: of the adapters is lost than kept
    adapter_db: float
    #: the quantized weight alone, compared with the original; None: no originals were given
    base_db: float | None = None

    @property
    def loss_db(self) -> float | None:
        """By how much the merged weight is further from its sum than the weight alone from the original."""
        return None if self.base_db is None else self.base_db - self.sqnr_db


@dataclass(frozen=True)
class MergeReport:
    """The records of all layers with adapters."""

    records: tuple[MergeRecord, ...]

    def worst(self) -> MergeRecord:
        """The layer that keeps least of its adapters."""
        return min(self.records, key=lambda record: record.adapter_db)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {"records": [asdict(record) for record in self.records]}

    def __str__(self) -> str:
        head = ("layer", "adapters", "weight before, dB", "merged, dB", "adapter kept, dB")
        rows = [
            (
                r.name,
                ", ".join(r.adapters),
                "" if r.base_db is None else f"{r.base_db:.1f}",
                f"{r.sqnr_db:.1f}",
                f"{r.adapter_db:.1f}",
            )
            for r in self.records
        ]
        return aligned([head, *rows], right=(2, 3, 4))


@torch.no_grad()
def merge_report(
    model: nn.Module,
    originals: Originals | None = None,
    adapter_names: Sequence[str] | None = None,
) -> MergeReport:
    """What `merge_adapter` or `merge_and_unload` would cost, layer by layer; changes nothing.

    Merging quantizes the sum of a weight and its adapters, which loses most of an adapter that is smaller
    than a step of the format.

    Args:
        model: what `get_peft_model` made with `over_quantized`.
        originals: the weights before quantization, for `base_db`: as for `initialize_adapters_`.
        adapter_names: those to merge; None: the active ones.

    Raises:
        ConfigError: no layer has such adapters, or an original is missing.
        QuantizationError: zero points of a layer cannot take an adapter of QA-LoRA.
    """
    read = None if originals is None else reader(originals, getattr(model, "base_model_prefix", ""))
    records = []
    for name, layer in adapted_layers(model):
        asked = layer.active_adapters if adapter_names is None else adapter_names
        names = tuple(each for each in asked if each in layer.lora_A)
        if not names:
            continue
        made = layer.with_adapters(names)
        weight, merged = dense(layer.unmerged_weight), dense(made.weight)
        base = (
            None if read is None else float(sqnr(read(f"{name}.weight").to(weight.device), weight))
        )
        kept = float(sqnr(made.wanted - weight, merged - weight))
        records.append(MergeRecord(name, names, float(sqnr(made.wanted, merged)), kept, base))
    if not records:
        raise ConfigError(
            f"adapter_names={adapter_names!r}: no quantized layer has such adapters; pass "
            "over_quantized(config) to get_peft_model"
        )
    return MergeReport(tuple(records))
