"""Folders of models of transformers, as `ao quantize` meets them; needs no transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ao_core import FolderModel, Report
from ao_core.ext import ConfigError, json_object
from ao_core.ext.saving import read_text
from ao_hf.cards import CARD, card_of, load_lines
from ao_hf.hub import model_of
from ao_hf.method import METHOD, READERS, method_of, quantization_config

__all__ = ["CONFIG", "files", "hint", "kind_of", "model", "recognizes", "refuses"]

#: what makes a folder one of transformers
CONFIG = "config.json"
#: the vocabulary of a tokenizer is in one of these
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "*.tiktoken",
    "*.bpe.model", "tokenizer_config.json", "tekken.json",
)  # fmt: skip


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
    method = method_of(_config(folder))
    if method is None or method == METHOD:
        return None
    return (
        f"{CONFIG} says that it is quantized by {method!r} already, which {READERS.get(method, method)} "
        "reads; quantize the original"
    )


def files(source: Path, folder: Path, report: Report) -> dict[str, str]:
    """config.json with what transformers must know to load the result, and the model card."""
    model = _config(folder)
    before = model.get("quantization_config")
    model["quantization_config"] = quantization_config(report.config, before)
    done = model["quantization_config"]["config"]
    reasons = {record.fqn: record.reason for record in report if record.status != "changed"}
    made = {CONFIG: json.dumps(model, indent=2, sort_keys=True) + "\n"}
    base = model_of(source)
    text = card_of(
        folder, done, reasons, "transformers", kind_of(folder), base=base, derived=base is not None
    )
    return made if text is None else {**made, CARD: text}


def hint(folder: Path) -> str:
    """The line of Python that loads the model, and what is missing for using it."""
    config = _config(folder)
    load = "; ".join(load_lines("transformers", kind_of(folder), str(folder)))
    line = f"load it with: {load}"
    if "vocab_size" in config and not any(any(folder.glob(name)) for name in _TOKENIZERS):
        line += "\nSRC has no tokenizer, so DST has none: load that of the original model"
    return line


def kind_of(folder: Path) -> str:
    """The class of the model of a folder."""
    names = _config(folder).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "AutoModel"


def model(folder: Path, names: Sequence[str]) -> FolderModel | str:
    """The model of transformers that a folder is of, without weights; or why it is not known."""
    named = _config(folder).get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        return f"{CONFIG} names no class in 'architectures'"
    if find_spec("transformers") is None:
        return "transformers, which knows the model, is not installed"
    from ao_hf.transformers.folders import folder_model

    return folder_model(folder, named[0], names)
