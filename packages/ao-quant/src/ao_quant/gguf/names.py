"""Names and rows of tensors in GGUF files, and in models of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ao_core.ext import CheckpointError, ConfigError

__all__ = ["NAMES", "Place", "places"]

#: values of `names`
NAMES = ("file", "transformers")

#: module outside and inside the blocks: in the file -> in transformers
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: the same where a block has norms before and after attention and the layers behind it
_BLOCK_OF_GEMMA = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_FILE = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)|(\w+)\.(weight|bias)")
#: what models compute from their configuration, and have no parameter for
_COMPUTED = ("rope_freqs.weight",)


class Architecture(NamedTuple):
    """How files of an architecture differ from models of transformers."""

    #: module inside a block: in the file -> in transformers
    block: dict[str, str]
    #: whether llama.cpp's converter reorders the rows of queries and keys
    reordered: bool = False
    #: what it adds to the gains of norms
    added: float = 0.0


_ARCHITECTURES = {
    "llama": Architecture(_BLOCK, reordered=True),
    "qwen2": Architecture(_BLOCK),
    "qwen3": Architecture(_BLOCK),
    "gemma": Architecture(_BLOCK, added=1.0),
    "gemma3": Architecture(_BLOCK_OF_GEMMA, added=1.0),
}


class Place(NamedTuple):
    """A tensor of a file, and where a model of transformers has it."""

    #: in the file
    file: str
    #: in the model
    model: str
    #: heads whose rows are in another order in the file; 0: all are where the model has them
    heads: int = 0
    #: what the values in the file have more than those in the model
    added: float = 0.0

    def read(self, rows: Tensor) -> Tensor:
        """Rows of the file, of any kind, in the order of the model."""
        return self._reordered(rows, 2)

    def write(self, rows: Tensor) -> Tensor:
        """Rows of the model in the order of the file."""
        return self._reordered(rows, 1)

    def _reordered(self, rows: Tensor, pairs: int) -> Tensor:
        """Rotary embeddings pair rows i and i + d/2 of a head in the model, 2i and 2i + 1 in the file."""
        if not self.heads:
            return rows
        count = rows.shape[0]
        shape = (-1, 2) if pairs == 2 else (2, -1)
        order = torch.arange(count).view(self.heads, count // self.heads).unflatten(1, shape)
        return rows[order.transpose(1, 2).reshape(-1)]


def places(
    names: str, found: Mapping[str, Tensor] | Iterable[str], metadata: Mapping[str, Any]
) -> dict[str, Place]:
    """Where each tensor belongs, by the name that is given.

    Args:
        names: "file": all as they are; "transformers": what they are called there.
        found: names in the file or, of `write_gguf`, in the model.
        metadata: of the file; says the architecture, and how many heads there are.

    Raises:
        ConfigError: no such `names`.
        CheckpointError: the architecture, or a tensor, is none whose name in transformers is known.
    """
    if names not in NAMES:
        raise ConfigError(f"names={names!r}: use one of {', '.join(map(repr, NAMES))}")
    if names == "file":
        return {name: Place(name, name) for name in found}
    architecture = metadata.get("general.architecture")
    rules = _ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if rules is None:
        raise CheckpointError(
            f"names='transformers': the architecture is {architecture!r}, and ao knows the names of "
            f"{', '.join(_ARCHITECTURES)}; use names='file'"
        )
    known = {}
    for name in found:
        place = _of_file(name, rules.block) or _of_model(name, rules.block)
        if place is None:
            raise CheckpointError(
                f"names='transformers': ao does not know where {name!r} of {architecture!r} belongs; use "
                "names='file'"
            )
        if rules.reordered and re.search(r"\.attn_[qk]\.", place.file):
            place = place._replace(heads=_heads(place.file, str(architecture), metadata))
        if place.file.endswith("norm.weight"):
            place = place._replace(added=rules.added)
        known[name] = place
    return known


def _of_file(name: str, table: Mapping[str, str]) -> Place | None:
    if name in _COMPUTED:
        return Place(name, name)
    if not (match := _IN_FILE.fullmatch(name)):
        return None
    block, inner, of_inner, outer, of_outer = match.groups()
    if block is not None and inner in table:
        return Place(name, f"model.layers.{block}.{table[inner]}.{of_inner}")
    return Place(name, f"{_MODEL[outer]}.{of_outer}") if outer in _MODEL else None


def _of_model(name: str, in_block: Mapping[str, str]) -> Place | None:
    owner, _, kind = name.rpartition(".")
    block = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", owner)
    table, inner = (_MODEL, owner) if block is None else (in_block, block[2])
    found = next((file for file, module in table.items() if module == inner), None)
    if found is None or kind not in ("weight", "bias"):
        return None
    return Place(f"{found}.{kind}" if block is None else f"blk.{block[1]}.{found}.{kind}", name)


def _heads(name: str, architecture: str, metadata: Mapping[str, Any]) -> int:
    """How many heads the rows of queries or keys are of."""
    key = f"{architecture}.attention.head_count"
    if ".attn_k." in name and f"{key}_kv" in metadata:
        key = f"{key}_kv"
    try:
        return int(metadata[key])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"names='transformers': the metadata {key!r} is {metadata.get(key)!r}, and the order of rows in "
            f"{name!r} depends on it: one number is needed; use names='file'"
        ) from error
