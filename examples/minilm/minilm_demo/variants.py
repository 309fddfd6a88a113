"""The variants of the model that are compared: the original, bfloat16, and one for each recipe."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from ao_core import Config, FqnToConfig, QTensor, Report, quantize_, save_model
from ao_core.ext import AoError, registry, repack
from minilm_demo import minilm

#: the variants that others are measured against
FP32, BF16 = "fp32", "bf16"

#: told (done, total, name of the next parameter) of one model
OnParameter = Callable[[int, int, str], None]

#: the embeddings are half of the model, and recipes keep them: these variants name them too
_EMBEDDINGS = "re:.*word_embeddings.*"
_G32 = "int4_weight_only/g32-asymmetric"
_WITH_EMBEDDINGS = {
    "int8 + int8 embeddings": ("int8_weight_only", "int8_weight_only"),
    "int4 g32 + int8 embeddings": (_G32, "int8_weight_only"),
}
#: the variant that is saved and loaded again
SAVED = "int4 g32 + int8 embeddings"


@dataclass(frozen=True)
class Variant:
    """A model, and what making it took."""

    name: str
    summary: str
    model: nn.Module
    #: None for the models that are not quantized
    report: Report | None = None
    seconds: float = 0.0


def configs() -> dict[str, tuple[Config, str]]:
    """Name -> configuration and summary: every recipe of the installed packages, then our own."""
    found = {name: (recipe.config, recipe.summary) for name, recipe in registry.recipes.items()}
    for name, (linear, embedding) in _WITH_EMBEDDINGS.items():
        if linear in found and embedding in found:
            config = FqnToConfig({_EMBEDDINGS: embedding, "*": linear})
            found[name] = (config, f"FqnToConfig: {embedding} for word embeddings, else {linear}")
    return found


def baselines(model: nn.Module) -> list[Variant]:
    """The original and its bfloat16 copy."""
    return [
        Variant(FP32, "the original", model),
        Variant(BF16, "all parameters rounded to bfloat16", in_bfloat16(model)),
    ]


def quantized(
    model: nn.Module, name: str, config: Config, summary: str, progress: OnParameter
) -> Variant | str:
    """The variant that a configuration makes of the model, or why it is not one to compare.

    Recipes for training leave the weights in high precision and change how they are multiplied:
    nothing gets smaller, so they are left out, by what they give and not by name.
    """
    copy = minilm.share(model)
    start = time.perf_counter()
    try:
        report = quantize_(copy, config, progress=progress)
    except AoError as error:
        return f"does not apply here: {error}"
    if not any(isinstance(parameter, QTensor) for parameter in copy.parameters()):
        return "a recipe for training: its weights stay in high precision"
    return Variant(name, summary, copy, report, time.perf_counter() - start)


def in_bfloat16(model: nn.Module) -> nn.Module:
    """A copy that computes in bfloat16; quantized weights keep their codes, in a fitting layout."""
    copy = minilm.share(model)
    for module in copy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_cast(parameter), requires_grad=False)
    return copy


def _cast(parameter: Tensor) -> Tensor:
    if isinstance(parameter, QTensor):
        return repack(cast("QTensor", parameter.canonical().to(torch.bfloat16)))
    return parameter.bfloat16()


def memory_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, those that are shared once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(sum(leaf.nbytes for leaf in _leaves(tensor)) for tensor in tensors.values())


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors in which a tensor, quantized or not, is stored."""
    if isinstance(tensor, QTensor):
        yield from (leaf for _, leaf in tensor.leaves())
    else:
        yield tensor


def disk_bytes(model: nn.Module) -> int:
    """Bytes of all files that `save_model` writes."""
    with tempfile.TemporaryDirectory(prefix="minilm-") as folder:
        target = Path(folder) / "checkpoint"
        save_model(model, target)
        return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
