"""Folders of models and pipelines, as `ao quantize` meets them; needs no library of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ao_core import FolderKind, FolderModel, Report, Tokenizer
from ao_core.ext import ConfigError, json_object
from ao_core.ext.saving import read_text
from ao_hf import hub
from ao_hf.cards import CARD, card_of, load_lines
from ao_hf.method import METHOD, READERS, method_of, quantization_config
from ao_hf.pipelines import PIPELINE, components_of

__all__ = ["CONFIG", "DIFFUSERS", "PIPELINES", "TRANSFORMERS", "kind_of", "refuses"]

#: what makes a folder that of a model
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


def _is_transformers(folder: Path) -> bool:
    """Whether a folder has the configuration of a model of transformers."""
    return isinstance(_config(folder).get("model_type"), str)


def _is_diffusers(folder: Path) -> bool:
    """Whether a folder has the configuration of a model of diffusers, a component of a pipeline."""
    config = _config(folder)
    return isinstance(config.get("_class_name"), str) and not _is_transformers(folder)


def refuses(folder: Path) -> str | None:
    """Why the weights of a model's folder are not quantized: another method did that already."""
    method = method_of(_config(folder))
    if method is None or method == METHOD:
        return None
    return (
        f"{CONFIG} says that it is quantized by {method!r} already, which {READERS.get(method, method)} "
        "reads; quantize the original"
    )


def kind_of(folder: Path) -> str:
    """The class of the model of a folder."""
    config = _config(folder)
    if isinstance(name := config.get("_class_name"), str):
        return name
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "AutoModel"


def _files(library: str, source: Path, folder: Path, report: Report) -> dict[str, str]:
    """config.json with what its library must know to load the result, and the model card."""
    model = _config(folder)
    before = model.get("quantization_config")
    model["quantization_config"] = quantization_config(report.config, before)
    done = model["quantization_config"]["config"]
    reasons = {record.fqn: record.reason for record in report if record.status != "changed"}
    made = {CONFIG: json.dumps(model, indent=2, sort_keys=True) + "\n"}
    base = hub.model_of(source)
    text = card_of(
        folder, done, reasons, library, kind_of(folder), base=base, derived=base is not None
    )
    return made if text is None else {**made, CARD: text}


def _untied(folder: Path) -> dict[str, str]:
    """config.json that says that the head has a weight of its own."""
    model = _config(folder)
    for config in (model, model.get("text_config")):
        if isinstance(config, dict):
            config["tie_word_embeddings"] = False
    return {CONFIG: json.dumps(model, indent=2, sort_keys=True) + "\n"}


def _hint(library: str, folder: Path) -> str:
    """The line of Python that loads the model, and what is missing for using it."""
    load = "; ".join(load_lines(library, kind_of(folder), str(folder)))
    line = f"load it with: {load}"
    needs_tokenizer = "vocab_size" in _config(folder)
    if needs_tokenizer and not any(any(folder.glob(name)) for name in _TOKENIZERS):
        line += "\nSRC has no tokenizer, so DST has none: load that of the original model"
    return line


def _model_of_transformers(folder: Path, names: Sequence[str]) -> FolderModel | str:
    """The model of transformers that a folder is of, without weights; or why it is not known."""
    named = _config(folder).get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        return f"{CONFIG} names no class in 'architectures'"
    if find_spec("transformers") is None:
        return "transformers, which knows the model, is not installed"
    from ao_hf.transformers.folders import folder_model

    return folder_model(folder, named[0], names)


def _tokenizer_of_transformers(folder: Path) -> Tokenizer | str:
    """How texts become inputs of a model of transformers."""
    if find_spec("transformers") is None:
        return "transformers, which has its tokenizer, is not installed"
    from ao_hf.transformers.texts import tokenizer_of

    return tokenizer_of(folder)


def _model_of_diffusers(folder: Path, names: Sequence[str]) -> FolderModel | str:
    """The model of diffusers that a folder is of, without weights; or why it is not known."""
    if find_spec("diffusers") is None:
        return "diffusers, which knows the model, is not installed"
    from ao_hf.diffusers.folders import folder_model

    return folder_model(folder, kind_of(folder), names)


def _refuses_pipeline(folder: Path) -> str:
    first = components_of(folder)[0]
    return (
        f"{PIPELINE} says that it is a pipeline, whose components are quantized one by one: give "
        f"{folder / first}, or call ao_hf.diffusers.quantize_pipeline, which copies the rest"
    )


TRANSFORMERS = FolderKind(
    "transformers",
    _is_transformers,
    refuses,
    partial(_files, "transformers"),
    partial(_hint, "transformers"),
    model=_model_of_transformers,
    fetch=hub.fetch,
    tokenizer=_tokenizer_of_transformers,
    untied=_untied,
)
DIFFUSERS = FolderKind(
    "diffusers",
    _is_diffusers,
    refuses,
    partial(_files, "diffusers"),
    partial(_hint, "diffusers"),
    model=_model_of_diffusers,
)
PIPELINES = FolderKind(
    "diffusers pipelines",
    lambda folder: bool(components_of(folder)),
    _refuses_pipeline,
    lambda source, folder, report: {},
    str,
)
