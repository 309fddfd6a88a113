"""Folders of models of transformers, as `ao quantize` meets them; needs no transformers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ao_core import Report, open_checkpoint
from ao_core.ext import ConfigError, json_object
from ao_core.ext.saving import read_text
from ao_hf.cards import CARD, methods, renewed, section
from ao_hf.hub import model_of
from ao_hf.method import METHOD, READERS, method_of, quantization_config

__all__ = ["CONFIG", "card", "files", "hint", "load_lines", "recognizes", "refuses"]

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
    text = card(folder, done, reasons, base=base, load=load_lines(folder), derived=base is not None)
    return made if text is None else {**made, CARD: text}


def card(
    folder: Path,
    config: Mapping[str, Any],
    reasons: Mapping[str, str],
    *,
    load: str,
    base: str | None = None,
    derived: bool = False,
    tags: Sequence[str] = (),
) -> str | None:
    """The model card of a folder: its own with a section on what was quantized, or a new one.

    Args:
        folder: with the weights.
        config: what was done, in the form of `config_to_dict`.
        reasons: why weights were kept, by name.
        load: lines of Python that load the folder.
        base: the name on the Hub of the model that was quantized, if it has one.
        derived: whether the card is a copy of that model's, which names the model before it.
        tags: more of them.

    Returns:
        None, with a warning, where what is there is no text.
    """
    try:
        there = read_text(str(folder / CARD)) if (folder / CARD).exists() else None
    except ConfigError as error:
        warnings.warn(f"{folder}: no model card is written: {error}", stacklevel=2)
        return None
    text = section(open_checkpoint(folder), config, reasons, load)
    lineage = {"base_model": base, "base_model_relation": "quantized"} if base else {}
    facts = {"library_name": "transformers", "tags": [METHOD, *methods(config), *tags], **lineage}
    title = base.rpartition("/")[2] if base else _kind(folder)
    return renewed(
        there, text, f"{title}, quantized by ao", facts, sure=lineage if derived else None
    )


def hint(folder: Path) -> str:
    """The line of Python that loads the model, and what is missing for using it."""
    config = _config(folder)
    line = f"load it with: {load_lines(folder, str(folder), '; ')}"
    if "vocab_size" in config and not any(any(folder.glob(name)) for name in _TOKENIZERS):
        line += "\nSRC has no tokenizer, so DST has none: load that of the original model"
    return line


def load_lines(folder: Path, name: str = "PATH or ORG/NAME", newline: str = "\n") -> str:
    """Lines of Python that load the model of a folder, by a name."""
    load = f"model = transformers.{_kind(folder)}.from_pretrained({name!r})"
    return f"import ao_hf, transformers{newline}{load}"


def _kind(folder: Path) -> str:
    """The class of the model of a folder."""
    names = _config(folder).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "AutoModel"
