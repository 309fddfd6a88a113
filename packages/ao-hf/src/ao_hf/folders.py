"""Folders of models and pipelines, as `ao quantize` meets them; needs no library of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ao_core import FolderKind
from ao_core.ext import ConfigError, json_object
from ao_core.ext.saving import read_text
from ao_hf.method import METHOD, READERS, quantization_config
from ao_hf.pipelines import PIPELINE, components_of

__all__ = ["CONFIG", "DIFFUSERS", "PIPELINES", "TRANSFORMERS"]

#: what makes a folder that of a model
CONFIG = "config.json"


def _config(folder: Path) -> dict[str, Any]:
    """The configuration of a model; empty where there is none that can be read."""
    try:
        return json_object(read_text(str(folder / CONFIG)), CONFIG)
    except ConfigError:
        return {}


def _is_transformers(folder: Path) -> bool:
    """Whether a folder has the configuration of a model of transformers."""
    return isinstance(_config(folder).get("model_type"), str)


def _is_diffusers(folder: Path) -> bool:
    """Whether a folder has the configuration of a model of diffusers, a component of a pipeline."""
    config = _config(folder)
    return isinstance(config.get("_class_name"), str) and not _is_transformers(folder)


def _refuses(folder: Path) -> str | None:
    """Why the weights of such a folder are not quantized: another method did that already."""
    present = _config(folder).get("quantization_config")
    if not isinstance(present, Mapping) or present.get("quant_method") == METHOD:
        return None
    method = present.get("quant_method", "?")
    return (
        f"{CONFIG} says that it is quantized by {method!r} already, which {READERS.get(method, method)} "
        "reads; quantize the original"
    )


def _files(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """config.json with what its library must know to load the result."""
    model = _config(folder)
    before = model.get("quantization_config")
    model["quantization_config"] = quantization_config(config, before)
    return {CONFIG: json.dumps(model, indent=2, sort_keys=True) + "\n"}


def _hint(library: str, name: str, folder: Path) -> str:
    """The line of Python that loads the model."""
    load = f"model = {library}.{name}.from_pretrained({str(folder)!r})"
    return f"load it with: import ao_hf, {library}; {load}"


def _hint_transformers(folder: Path) -> str:
    names = _config(folder).get("architectures")
    name = names[0] if isinstance(names, list) and names else "AutoModel"
    return _hint("transformers", name, folder)


def _hint_diffusers(folder: Path) -> str:
    return _hint("diffusers", _config(folder)["_class_name"], folder)


def _refuses_pipeline(folder: Path) -> str:
    first = components_of(folder)[0]
    return (
        f"{PIPELINE} says that it is a pipeline, whose components are quantized one by one: give "
        f"{folder / first}, or call ao_hf.diffusers.quantize_pipeline, which copies the rest"
    )


TRANSFORMERS = FolderKind("transformers", _is_transformers, _refuses, _files, _hint_transformers)
DIFFUSERS = FolderKind("diffusers", _is_diffusers, _refuses, _files, _hint_diffusers)
PIPELINES = FolderKind(
    "diffusers pipelines",
    lambda folder: bool(components_of(folder)),
    _refuses_pipeline,
    lambda folder, config: {},
    str,
)
