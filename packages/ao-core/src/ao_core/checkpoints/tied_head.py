"""Whether the embedding of a checkpoint is its output head too, as the `config.json` beside it says."""

from __future__ import annotations

import re
from typing import Any

from ao_core.errors import CheckpointError
from ao_core.schema import BOOL, TEXT, Fields, Items, Number, Optional, SchemaError
from ao_core.tensor.saving import Checkpoint
from ao_core.tensor.saving.files import read_json

__all__ = ["HEAD", "tied_embedding"]

#: the module that a tied head is taken for
HEAD = "lm_head"
#: models with a head, by the names of their classes
_WITH_HEAD = re.compile(r"LMHead|ForCausalLM|ForMaskedLM|ForConditionalGeneration")
_TEXT = {"tie_word_embeddings": Optional(BOOL), "vocab_size": Optional(Number(1, 1 << 40))}
_FIELDS = Fields(
    {},
    {**_TEXT, "architectures": Optional(Items(TEXT)), "text_config": Optional(Fields({}, _TEXT))},
)


def tied_embedding(checkpoint: Checkpoint, embeddings: list[str]) -> str | None:
    """The name among these of the embedding that `quantize_` would find to be the head of the model, too.

    A publisher leaves a tied head out. So `config.json` must not deny that they are tied, its model must
    have a head, one embedding has a row for each token, and no other matrix does. A `config.json` that is
    missing, or of another program, says nothing.
    """
    config = _config(checkpoint)
    tied = config.get("tie_word_embeddings")
    if tied is False or not any(map(_WITH_HEAD.search, config.get("architectures") or ())):
        return None
    rows = config.get("vocab_size")
    wide = [n for n, e in checkpoint.entries.items() if len(e.shape) == 2 and e.shape[0] == rows]
    heads = [
        name for name in (*checkpoint.entries, *checkpoint.ties) if name.startswith(f"{HEAD}.")
    ]
    return wide[0] if len(wide) == 1 and wide[0] in embeddings and not heads else None


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    try:
        data = read_json(folder / "config.json", _FIELDS, "config.json")
    except (CheckpointError, SchemaError):
        return {}
    inner = {
        name: value for name, value in (data.get("text_config") or {}).items() if name in _TEXT
    }
    return {**data, **inner}
