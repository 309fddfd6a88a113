"""A language model and its tokenizer from a folder or a GGUF file, as it is or quantized, and its drafts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ao_core import QTensor, quantize_
from ao_core.ext import CheckpointError, ConfigError, MissingExtraError, checked, json_object, shown
from ao_core.ext.kernels import upper_nibbles
from ao_core.ext.saving import read_text
from ao_hf import hub
from ao_hf.folders import CONFIG
from ao_hf.generation.gguf import header_of, is_gguf, model_of_gguf
from ao_hf.method import METHOD, method_of

__all__ = [
    "DTYPES",
    "Loaded",
    "check_recipe",
    "device_of",
    "draft_of",
    "empty_model",
    "folder_of",
    "is_quantized",
    "load",
    "load_tokenizer",
    "recipe_of",
    "transformers_of_ao",
]

#: what `dtype` may be; "auto" is that of the files
DTYPES = ("auto", "float32", "bfloat16", "float16")
#: the draft of the upper halves of codes
NIBBLES = "nibbles"
#: short names of drafts
_DRAFTS = {"int4": "int4_weight_only/g32-asymmetric", "int8": "int8_weight_only"}


@dataclass(frozen=True)
class Loaded:
    """A causal language model of transformers, ready to generate.

    Attributes:
        model: in evaluation mode, without gradients.
        tokenizer: None where the folder has none and none was asked for.
        folder: that it was loaded from, or the GGUF file.
        recipe: by which it was quantized while loading; None for the model as it is in the folder.
    """

    model: Any
    tokenizer: Any
    folder: Path
    recipe: str | None = None

    @property
    def quantized(self) -> bool:
        """Whether weights are in few bits, by ao or another method."""
        return method_of(self.model.config.to_dict()) is not None

    @property
    def name(self) -> str:
        """For tables: the recipe, the dtype of a dense model, or the name of a quantized folder or file."""
        if self.recipe is not None:
            return self.recipe
        return self.folder.name if self.quantized else _name(self.model.dtype)


def folder_of(name: str | Path) -> Path:
    """The folder that a name stands for: itself, or that of a model of the Hub, `ORG/NAME[@REVISION]`.

    A GGUF file stands for itself, too.

    Raises:
        CheckpointError: there is no such folder or model, or the folder is of no model of transformers.
    """
    folder = Path(name)
    if not folder.exists():
        found = hub.fetch(folder.as_posix())
        if found is None:
            raise CheckpointError(
                f"{name}: there is no such folder or file, and it is no ORG/NAME of the Hub"
            )
        folder = found
    if is_gguf(folder):
        return folder
    if not (folder / CONFIG).is_file():
        kind = "folder" if folder.is_dir() else "file"
        raise CheckpointError(
            f"{name}: this {kind} has no {CONFIG}, so transformers knows no model of it; give the folder "
            f"that `save_pretrained` or `ao quantize` wrote, or a GGUF file{_files_in(folder)}"
        )
    return folder


def _files_in(folder: Path) -> str:
    """The GGUF files of a folder, for errors."""
    names = sorted(path.name for path in folder.glob("*.gguf")) if folder.is_dir() else []
    return f", of which it has {', '.join(names[:3])}" if names else ""


def recipe_of(name: str) -> str:
    """The name of a recipe; "int4" and "int8" are short for those of weights only."""
    return _DRAFTS.get(name, name)


@checked
def load(
    name: str | Path,
    recipe: str | None = None,
    *,
    device: str | None = None,
    dtype: str = "auto",
    tokenizer: bool = True,
) -> Loaded:
    """Load a causal language model, and quantize it on the way where a recipe is named.

    Args:
        name: a folder, dense or quantized by ao, a GGUF file, or `ORG/NAME` of the Hub.
        recipe: as for `AoConfig`; None keeps the model as it is.
        device: "cpu", "cuda", …; None: the accelerator of this machine, else its CPU.
        dtype: of `DTYPES`, the logical dtype. "auto" is bfloat16 for a GGUF file with quantized tensors:
            those have none.
        tokenizer: whether the tokenizer is loaded too.

    Raises:
        MissingExtraError: transformers is not installed.
        CheckpointError: there is no such model, or it has no tokenizer.
        UnknownNameError: no recipe has that name; with a suggestion.
        ConfigError: the recipe cannot be used while loading, or `dtype` or `device` is unknown.
    """
    transformers = transformers_of_ao()
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: use one of {', '.join(DTYPES)}")
    place, folder = device_of(device), folder_of(name)
    if is_gguf(folder):
        return _of_gguf(folder, recipe, place, dtype, tokenizer)
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if recipe is not None:
        options["quantization_config"] = check_recipe(recipe, folder)
    if place.type != "cpu":
        options["device_map"] = {"": place}
    words = load_tokenizer(folder) if tokenizer else None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    return Loaded(model.eval().requires_grad_(False), words, folder, recipe)


def _of_gguf(
    path: Path, recipe: str | None, place: torch.device, dtype: str, tokenizer: bool
) -> Loaded:
    header = header_of(path)
    if recipe is not None:
        check_recipe(recipe, path)
    words = load_tokenizer(path) if tokenizer else None
    wanted = None if dtype == "auto" else getattr(torch, dtype)
    model = model_of_gguf(path, header, wanted, place)
    if recipe is not None:
        quantize_(model, recipe)
    return Loaded(model.eval().requires_grad_(False), words, path, recipe)


def empty_model(build: Callable[[], Any]) -> Any:
    """A model with its parameters on the meta device, and buffers that were computed.

    Args:
        build: makes the model.

    Raises:
        MissingExtraError: accelerate is not installed.
    """
    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        raise MissingExtraError("accelerate", "ao-hf[transformers]", "an empty model") from error
    # some models draw buffers
    with init_empty_weights(include_buffers=False), torch.random.fork_rng([]):
        return build().requires_grad_(False)


def check_recipe(recipe: str, folder: Path) -> Any:
    """The `AoConfig` of a recipe, for a folder that is not quantized yet.

    Raises:
        UnknownNameError: no recipe has that name; with a suggestion.
        ConfigError: the recipe cannot be used while loading, or the folder is quantized.
    """
    from ao_hf.config import AoConfig

    config = AoConfig(recipe)  # whose name is checked first
    method = _method(folder)
    if method is not None:
        by = "ao" if method == METHOD else f"{method!r}"
        raise ConfigError(
            f"recipe={recipe!r}: {folder} is quantized by {by} already; leave the recipe out, or give the "
            "folder of the original"
        )
    return config


def is_quantized(folder: Path) -> bool:
    """Whether config.json, or the header of a GGUF file, says that the weights are in few bits."""
    return _method(folder) is not None


def _method(folder: Path) -> str | None:
    if is_gguf(folder):
        return "gguf" if header_of(folder).quantized else None
    return method_of(json_object(read_text(str(folder / CONFIG)), CONFIG))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder or a GGUF file.

    Raises:
        CheckpointError: it has none that can be loaded.
    """
    transformers, file = transformers_of_ao(), is_gguf(folder)
    try:
        if file:  # the tokens are those of AutoTokenizer, which parses the file twice more: seconds
            made = transformers.PreTrainedTokenizerFast
            return made.from_pretrained(folder.parent, gguf_file=folder.name)
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{folder} has no tokenizer that transformers can load ({reason}): "
            + (
                "its metadata must have the keys of tokenizer.ggml"
                if file
                else "copy tokenizer.json and tokenizer_config.json of the original model into it"
            )
        ) from error


def draft_of(target: Loaded, recipe: str) -> Loaded:
    """The same checkpoint in fewer bits, for `generate(…, draft=…)`.

    What both keep alike, such as embeddings, norms and heads, is shared and takes no more memory. Call
    `ao_hf.fuse(draft.model)` to make it faster.

    Args:
        target: the model whose tokens are drafted.
        recipe: as for `load`; "int4" and "int8" are short for the recipes of weights only. "nibbles": the
            upper halves of the codes of a target in int8, which are half the bytes of its matrices.

    Raises:
        ConfigError: "nibbles" of a target that has no weights in int8.
    """
    if recipe == NIBBLES:
        return Loaded(_nibbles_of(target.model), None, target.folder, NIBBLES)
    name = recipe_of(recipe)
    place, dtype = str(target.model.device), _name(target.model.dtype)
    if not target.quantized or target.recipe is not None:
        draft = load(target.folder, name, device=place, dtype=dtype, tokenizer=False)
    else:  # the folder has codes only: those of the draft are made of their values
        found = load(target.folder, device=place, dtype=dtype, tokenizer=False)
        dense = found.model.dequantize()
        quantize_(dense, name)
        draft = Loaded(dense, None, target.folder, name)
    _share(draft.model, target.model)
    return draft


def _nibbles_of(target: Any) -> Any:
    """A copy of a model that shares all but the weights of its blocks, which are upper halves of codes."""
    model = copy.deepcopy(target, memo={id(p): p for p in target.parameters()})
    ends = {id(end) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    found = False
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if id(module) not in ends and isinstance(weight, QTensor) and weight.spec.dtype == "int8":
            made = torch.nn.Parameter(upper_nibbles(weight), requires_grad=False)
            module._parameters["weight"] = made
            found = True
    if not found:
        raise ConfigError(
            f"recipe={NIBBLES!r}: the target has no weights in int8, whose upper halves it would be; load it "
            "with recipe='int8_weight_only'"
        )
    return model


def _share(draft: Any, target: Any) -> None:
    """Let a draft have the parameters of its target where both are the same.

    Quantized weights of the blocks are left out: `fuse` joins those of each model in memory of its own.
    """
    own = dict(target.named_parameters(remove_duplicate=False))
    ends = [target.get_input_embeddings(), target.get_output_embeddings()]
    outside = {id(module.weight) for module in ends if module is not None}
    for name, parameter in list(draft.named_parameters(remove_duplicate=False)):
        other = own.get(name)
        if other is None or (isinstance(other, QTensor) and id(other) not in outside):
            continue
        if other is not parameter and _alike(parameter, other):
            path, _, last = name.rpartition(".")
            draft.get_submodule(path)._parameters[last] = other


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not isinstance(one, QTensor):
        return torch.equal(one, other)
    if one.spec != other.spec or one.parts.keys() != other.parts.keys():
        return False
    return all(torch.equal(part, other.parts[name]) for name, part in one.parts.items())


def device_of(name: str | None) -> torch.device:
    """The device of that name; None: the accelerator of this machine, else its CPU.

    Raises:
        ConfigError: torch knows none of that name, or the machine has none.
    """
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else found
    try:
        place = torch.device(name)
        there = place.type == "cpu" or torch.get_device_module(place.type).is_available()
    except RuntimeError as error:
        raise ConfigError(
            f"device={name!r}: torch knows no such device: {shown(str(error))}"
        ) from error
    if not there:
        raise ConfigError(f"device={name!r}: this machine has none; use 'cpu'")
    return place


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def transformers_of_ao() -> Any:
    """The module transformers, which knows ao.

    Raises:
        MissingExtraError: it is not installed.
    """
    if find_spec("transformers") is None:
        raise MissingExtraError("transformers", "ao-hf[transformers]", "generating text")
    import transformers

    import ao_hf  # noqa: F401 - registers ao

    return transformers
