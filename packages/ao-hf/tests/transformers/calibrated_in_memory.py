"""Calibration data for the small models, and what `quantize_` in memory makes of a folder with them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ao_core import Report, quantize_, save_model

__all__ = ["batches", "in_memory"]


def batches(count: int = 3) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(0, 96, (2, 24), generator=generator), "use_cache": False}
        for _ in range(count)
    ]


def in_memory(folder: Path, config: object, target: Path) -> tuple[PreTrainedModel, Report]:
    """The quantized model, which is saved, and the report."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    report = quantize_(model, config, data=batches())
    save_model(model, target)
    return model, report
