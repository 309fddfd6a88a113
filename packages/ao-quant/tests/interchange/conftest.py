"""Weights of every family, the formats they go to, and folders of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext.interchange import ForeignWeight, Interchange, Source, flatten
from ao_quant.interchange.one import Stored, convert_weight


@pytest.fixture(scope="session")
def source_of() -> Callable[..., Source]:
    """(tensors, label, header) -> what a reader sees."""

    def source_of(
        tensors: Mapping[str, Tensor],
        quantization: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        dtype: str = "float16",
    ) -> Source:
        forms = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        return Source(
            forms,
            lambda n: tensors[n].clone(),
            {"dtype": dtype},
            quantization or {},
            metadata or {},
        )

    return source_of


@pytest.fixture(scope="session")
def convert() -> Callable[[QTensor, Interchange], Stored]:
    """(a tensor of ao, a format) -> what is written, and the verdict."""

    def convert(tensor: QTensor, form: Interchange) -> Stored:
        leaves, _ = flatten("m.weight", tensor)
        weight = ForeignWeight(tuple(leaves), lambda: tensor)
        return convert_weight("m.weight", weight, leaves.__getitem__, None, form)

    return convert


@pytest.fixture(scope="session")
def integers() -> Callable[..., QTensor]:
    """(bits, symmetric, group, shape) -> a matrix of integers with scales of float16."""

    def integers(
        bits: int, symmetric: bool, group: int = 32, shape: tuple[int, int] = (64, 128)
    ) -> QTensor:
        name, zero = (f"int{bits}", "none") if symmetric else (f"uint{bits}", "int")
        spec = Spec(name, (1, group), "float16", zero, "plain" if bits == 8 else "packed")
        return quantize_tensor(torch.randn(shape).half(), spec)

    return integers


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """(tensors, label, header) -> a folder with one file of tensors and config.json."""

    def folder(
        tensors: Mapping[str, Tensor],
        label: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        name: str = "source",
    ) -> Path:
        place = tmp_path / name
        place.mkdir()
        stored = {each: tensor.contiguous() for each, tensor in tensors.items()}
        save_file(stored, place / "model.safetensors", dict(metadata or {"format": "pt"}))
        config: dict[str, Any] = {"dtype": "float16", "kept": [1]}
        if label is not None:
            config["quantization_config"] = dict(label)
        (place / "config.json").write_text(json.dumps(config))
        (place / "tokenizer.json").write_text("{}")
        return place

    return folder
