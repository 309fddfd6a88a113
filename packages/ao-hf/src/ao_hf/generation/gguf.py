"""A language model and its tokenizer from a GGUF file: weights as the file has them, in the same blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ao_core import FqnToConfig, QTensor
from ao_core.ext import CheckpointError, MissingExtraError, repack

__all__ = ["header_of", "is_gguf", "model_of_gguf"]


class Functions(NamedTuple):
    """What of ao-quant a file is read with, by its names there: ao-hf does not depend on it."""

    read_gguf: Callable[..., Any]
    read_gguf_header: Callable[..., Any]
    GGUFWeightOnlyConfig: Callable[[str], Any]
    check_architecture: Callable[..., None]
    config_of: Callable[..., dict[str, Any]]
    #: the tensor by which files of Llama 3.1 and later divide rotary frequencies
    frequencies: str


@cache
def functions() -> Functions:
    """All of them.

    Raises:
        MissingExtraError: ao-quant is not installed.
    """
    try:
        files, configs = import_module("ao_quant.gguf"), import_module("ao_quant")
    except ModuleNotFoundError as error:
        raise MissingExtraError("ao_quant", "ao-quant[gguf]", "reading GGUF files") from error
    of = import_module("ao_quant.gguf.configuration")
    return Functions(
        files.read_gguf,
        files.read_gguf_header,
        configs.GGUFWeightOnlyConfig,
        of.check_architecture,
        of.config_of,
        of.FREQUENCIES,
    )


def is_gguf(path: Path) -> bool:
    """Whether it is a file that is named as GGUF files are, or begins as they do."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:  # the Hub's client keeps files by their digests
        return file.read(4) == b"GGUF"


def header_of(path: Path) -> Any:
    """The `GGUFHeader` of a file.

    Raises:
        CheckpointError: it is damaged, has tensors of unsupported types, or is of no known architecture.
        MissingExtraError: ao-quant, or the package `gguf`, is not installed.
    """
    header = functions().read_gguf_header(path)
    functions().check_architecture(path, header)
    return header


def model_of_gguf(path: Path, header: Any, dtype: torch.dtype | None, place: torch.device) -> Any:
    """The model that a GGUF file is of. Tensors in blocks stay so; what is dense gets `dtype`.

    Args:
        path: the file.
        header: of it, see `header_of`.
        dtype: the logical dtype; None: that of the embedding, and bfloat16 where tensors are in blocks.
        place: the device.

    Raises:
        CheckpointError: the metadata are those of no model, or its tensors are not those of the file.
    """
    from ao_hf.config import AoConfig  # which imports transformers
    from ao_hf.generation.models import empty_model, transformers_of_ao
    from ao_hf.transformers.models import attach

    chosen = dtype or _dtype(header)
    tensors = functions().read_gguf(path, dtype=chosen, names="transformers").tensors
    types = {n: i.type for n, i in zip(tensors, header.tensors.values(), strict=True)}
    kinds = {name: kind for name, kind in types.items() if isinstance(tensors[name], QTensor)}
    frequencies = tensors.pop(functions().frequencies, None)
    config = _model_config(path, functions().config_of(path, header, frequencies))
    model_class = transformers_of_ao().AutoModelForCausalLM
    model = empty_model(partial(model_class.from_config, config, dtype=chosen))
    if frequencies is not None:
        _check_rope(path, model, frequencies)
    _fill(path, model, tensors, place)
    if kinds:
        attach(model, AoConfig(_config(kinds)))
    return model.to(place)


def _model_config(path: Path, fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    if experts := fields.get("num_local_experts"):
        raise CheckpointError(
            f"{path}: has {experts} experts; only models without experts are made from GGUF files"
        )
    return AutoConfig.for_model(**fields)


def _check_rope(path: Path, model: Any, frequencies: Tensor) -> None:
    """Raise `CheckpointError` where a model does not divide its frequencies by those of the file."""
    theta = model.config.rope_parameters["rope_theta"]
    steps = torch.arange(0, model.config.head_dim, 2) / model.config.head_dim
    found = theta**-steps / model.model.rotary_emb.inv_freq.cpu()
    if found.shape != frequencies.shape or not torch.allclose(found, frequencies, rtol=1e-3):
        raise CheckpointError(
            f"{path}: {functions().frequencies} has other values than Llama 3.1 and later; ao knows "
            "those alone"
        )


def _dtype(header: Any) -> torch.dtype:
    """That of the embedding where all is dense; blocks have none, and models are trained in bfloat16."""
    embedding = header.tensors.get("token_embd.weight")
    if header.quantized or embedding is None:
        return torch.bfloat16
    return {"f32": torch.float32, "f16": torch.float16}.get(embedding.type, torch.bfloat16)


def _config(kinds: Mapping[str, str]) -> Any:
    """What the weights were quantized by: one type, or one for each name."""
    configs = {name: functions().GGUFWeightOnlyConfig(kind) for name, kind in kinds.items()}
    one = len(set(kinds.values())) == 1
    return next(iter(configs.values())) if one else FqnToConfig(configs)


def _fill(path: Path, model: Any, tensors: dict[str, Tensor], place: torch.device) -> None:
    """Give each parameter its tensor, in the layout of the best kernel; what was read goes one by one."""
    owned = {n: p for n, p in model.named_parameters() if n not in model.all_tied_weights_keys}
    for problem, names in (
        ("has no tensor for", owned.keys() - tensors.keys()),
        ("has tensors that the model has no place for:", tensors.keys() - owned.keys()),
    ):
        if names:
            raise CheckpointError(f"{path} {problem} {', '.join(sorted(names)[:3])} ({len(names)})")
    for name, parameter in owned.items():
        tensor = tensors.pop(name)
        if tensor.shape != parameter.shape:
            raise CheckpointError(
                f"{path}: {name} has the shape {tuple(tensor.shape)}, and by its metadata the model has "
                f"{tuple(parameter.shape)}"
            )
        moved = tensor.to(place)
        new = repack(moved) if isinstance(moved, QTensor) else moved.to(model.dtype, copy=True)
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._parameters[last] = nn.Parameter(new, requires_grad=False)
    model.tie_weights()
