"""Folders of models of transformers, as `ao quantize` meets them; needs no library of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ao_core import FolderModel
from ao_core.ext import ConfigError, json_object
from ao_core.ext.saving import read_text
from ao_hf.method import METHOD, READERS, quantization_config

__all__ = ["CONFIG", "files", "hint", "model", "recognizes", "refuses"]

#: what makes a folder one of transformers
CONFIG = "config.json"


def _config(folder: Path) -> dict[str, Any]:
    """The configuration of a model; empty where there is none that can be read."""
    try:
        return json_object(read_text(str(folder / CONFIG)), CONFIG)
    except ConfigError:
        return {}


def recognizes(folder: Path) -> bool:
    """Whether a folder has the configuration of a model of transformers."""
    return isinstance(_config(folder).get("model_type"), str)


def refuses(folder: Path) -> str | None:
    """Why the weights of such a folder are not quantized: another method did that already."""
    present = _config(folder).get("quantization_config")
    if not isinstance(present, Mapping) or present.get("quant_method") == METHOD:
        return None
    method = present.get("quant_method", "?")
    return (
        f"{CONFIG} says that it is quantized by {method!r} already, which {READERS.get(method, method)} "
        "reads; quantize the original"
    )


def files(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """config.json with what transformers must know to load the result."""
    model = _config(folder)
    before = model.get("quantization_config")
    model["quantization_config"] = quantization_config(config, before)
    return {CONFIG: json.dumps(model, indent=2, sort_keys=True) + "\n"}


def hint(folder: Path) -> str:
    """The line of Python that loads the model."""
    names = _config(folder).get("architectures")
    name = names[0] if isinstance(names, list) and names else "AutoModel"
    load = f"model = transformers.{name}.from_pretrained({str(folder)!r})"
    return f"load it with: import ao_hf, transformers; {load}"


def model(folder: Path, names: Sequence[str]) -> FolderModel | str:
    """The model of transformers that a folder is of, without weights; or why it is not known."""
    named = _config(folder).get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        return f"{CONFIG} names no class in 'architectures'"
    if find_spec("transformers") is None:
        return "transformers, which knows the model, is not installed"
    from ao_hf.transformers.folders import folder_model

    return folder_model(folder, named[0], names)
