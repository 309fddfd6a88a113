"""The configuration of transformers for the metadata of a GGUF file, and back; needs no transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ao_core.ext import CheckpointError

__all__ = ["FREQUENCIES", "check_architecture", "config_of", "frequencies_of", "metadata_of"]

#: architecture of the file -> `model_type` of transformers
_KINDS = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma3": "gemma3_text",
}
#: `model_type` of transformers -> architecture of the file
_ARCHITECTURES = {kind: name for name, kind in _KINDS.items()} | {
    "mistral": "llama",
    "mixtral": "llama",
}
#: key of the metadata, behind the architecture -> field of the configuration, and its type
_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "context_length": ("max_position_embeddings", int),
    "block_count": ("num_hidden_layers", int),
    "embedding_length": ("hidden_size", int),
    "feed_forward_length": ("intermediate_size", int),
    "attention.head_count": ("num_attention_heads", int),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
}
#: where a file has no such key, llama.cpp takes this
_THETA = 10000.0
#: the tensor by which files of Llama 3.1 and later divide rotary frequencies
FREQUENCIES = "rope_freqs.weight"
#: what such files leave out, as all models published so far have it
_LLAMA_3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: Gemma 3 of so many layers scales queries by columns per head, all others by elements of a head
_GEMMA_27B = 62


def check_architecture(path: Path, header: Any) -> None:
    """Raise `CheckpointError` where ao knows no model for a `GGUFHeader`, or it is that of a part of one."""
    architecture = header.metadata.get("general.architecture")
    if architecture not in _KINDS:
        raise CheckpointError(
            f"{path}: the architecture is {architecture!r}, and ao makes models of {', '.join(_KINDS)}"
        )
    if (parts := _Keys(path, "split", header.metadata).number("count", int, 1)) > 1:
        raise CheckpointError(
            f"{path}: is one of {parts} parts of a model; join them with llama-gguf-split --merge"
        )


def config_of(path: Path, header: Any, frequencies: Tensor | None = None) -> dict[str, Any]:
    """The fields of the configuration of the model that a file is of, `model_type` among them.

    Its architecture is known, see `check_architecture`.

    Args:
        path: the file, for errors.
        header: of it.
        frequencies: its tensor `FREQUENCIES`; None: it has none.

    Raises:
        CheckpointError: a key is missing, or says what no model can do.
    """
    architecture = header.metadata["general.architecture"]
    of = _Keys(path, architecture, header.metadata)
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{path}: has no tensor token_embd.weight")
    fields = {field: of.number(key, kind) for key, (field, kind) in _FIELDS.items()}
    heads = fields["num_attention_heads"]
    if heads < 1:
        raise CheckpointError(f"{path}: {architecture}.attention.head_count is {heads}")
    fields |= {
        "num_key_value_heads": of.number("attention.head_count_kv", int, heads),
        "head_dim": of.number("attention.key_length", int, fields["hidden_size"] // heads),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(of, frequencies),
    }
    turned = of.number("rope.dimension_count", int, fields["head_dim"])
    if turned != fields["head_dim"]:
        raise CheckpointError(
            f"{path}: has rotary embeddings of {turned} of {fields['head_dim']} elements of a head; only "
            "models that turn all elements are made from GGUF files"
        )
    kind = _KINDS[architecture]
    if architecture == "gemma3":
        fields |= _gemma(of, fields)
    if (experts := of.number("expert_count", int, 0)) and architecture == "llama":
        kind = "mixtral"
        used = of.number("expert_used_count", int, 2)
        fields |= {"num_local_experts": experts, "num_experts_per_tok": used}
    tokens = _tokens(_Keys(path, "tokenizer.ggml", header.metadata))
    return {"model_type": kind, **fields, **tokens}


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a file for a config.json of transformers, without those of the tokenizer.

    Raises:
        CheckpointError: it is of a model whose tensors ao has no names of in GGUF, or lacks a field.
    """
    config = config.get("text_config") or config
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise CheckpointError(
            f"config.json: model_type={kind!r}; GGUF files are written of {', '.join(_ARCHITECTURES)}"
        )
    name = _ARCHITECTURES[str(kind)]
    if missing := [field for field, _ in _FIELDS.values() if field not in config]:
        raise CheckpointError(f"config.json: {', '.join(missing)} are missing")
    found = {key: kind(config[field]) for key, (field, kind) in _FIELDS.items()}
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    found |= {
        "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": width,
        "vocab_size": int(config["vocab_size"]),
        **_rope_metadata(config),
    }
    if config.get("sliding_window") and name == "gemma3":
        found["attention.sliding_window"] = int(config["sliding_window"])
    if kind == "mixtral":
        found["expert_count"] = int(config["num_local_experts"])
        found["expert_used_count"] = int(config["num_experts_per_tok"])
    return {
        "general.architecture": name,
        "general.quantization_version": 2,
        **{f"{name}.{key}": value for key, value in found.items()},
    }


def _rope_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embeddings; where they are those of Llama 3, frequencies are a tensor, see `frequencies_of`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", config.get("rope_theta", _THETA))
    found: dict[str, Any] = {"rope.freq_base": float(theta)}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling in ("linear", "yarn"):
        found |= {"rope.scaling.type": scaling, "rope.scaling.factor": float(rope["factor"])}
        if scaling == "yarn":
            length = int(rope["original_max_position_embeddings"])
            found["rope.scaling.original_context_length"] = length
    elif scaling not in ("default", "llama3"):
        raise CheckpointError(f"config.json: rope_type={scaling!r} is not written to GGUF files")
    return found


def frequencies_of(config: Mapping[str, Any]) -> Tensor | None:
    """What Llama 3.1 and later divide rotary frequencies by (d/2,), float32; None for other models.

    Wavelengths up to original / high_freq_factor are as they were, those from original / low_freq_factor on
    grow by the factor, and those between by an average in the frequency.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    theta = float(rope.get("rope_theta", config.get("rope_theta", _THETA)))
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    length = float(rope["original_max_position_embeddings"])
    waves = 2 * torch.pi * theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    smooth = (length / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    found = torch.where(waves > length / low, torch.full_like(waves, factor), between)
    return torch.where(waves < length / high, torch.ones_like(waves), found).float()


class _Keys:
    """The metadata whose keys begin alike, such as those of an architecture."""

    def __init__(self, path: Path, begin: str, metadata: Mapping[str, Any]) -> None:
        self.path, self.begin, self.metadata = path, begin, metadata

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.begin}.{key}")

    def number(self, key: str, kind: Callable[[Any], Any], default: Any = None) -> Any:
        """The number under a key, or the default.

        Raises:
            CheckpointError: it is none, or there is neither.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        try:
            return kind(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: the metadata '{self.begin}.{key}' is {value!r}, and a number is needed"
            ) from error


def _rope(of: _Keys, frequencies: Tensor | None) -> dict[str, Any]:
    """`rope_parameters` of all layers."""
    found: dict[str, Any] = {"rope_theta": of.number("rope.freq_base", float, _THETA)}
    scaling = of.get("rope.scaling.type") or "none"
    if frequencies is not None and float(frequencies.max()) != 1.0:
        if scaling != "none":
            raise CheckpointError(
                f"{of.path}: has {FREQUENCIES}, and a rope.scaling.type of {scaling!r}; only one can be"
            )
        return found | {"rope_type": "llama3", "factor": float(frequencies.max()), **_LLAMA_3}
    if scaling == "none":
        return found | {"rope_type": "default"}
    if scaling not in ("linear", "yarn"):
        raise CheckpointError(
            f"{of.path}: rope.scaling.type is {scaling!r}, and ao knows none, linear and yarn"
        )
    found |= {"rope_type": scaling, "factor": of.number("rope.scaling.factor", float)}
    if scaling == "yarn":
        length = of.number("rope.scaling.original_context_length", int)
        found["original_max_position_embeddings"] = length
    return found


def _gemma(of: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 3 has besides: windows, with frequencies of their own, and another scale of queries."""
    whole = fields["num_hidden_layers"] == _GEMMA_27B
    width = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        "rope_parameters": {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": _THETA},
        },
        "sliding_window": of.number("attention.sliding_window", int),
        "query_pre_attn_scalar": width if whole else fields["head_dim"],
    }


def _tokens(of: _Keys) -> dict[str, Any]:
    """Special tokens; the end of a turn ends a text too."""
    names = ("bos", "eos", "eot", "padding")
    found = {
        n: of.number(f"{n}_token_id", int) for n in names if of.get(f"{n}_token_id") is not None
    }
    ends = list(dict.fromkeys(found[name] for name in ("eos", "eot") if name in found))
    return {
        "bos_token_id": found.get("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": found.get("padding"),
    }
