"""Texts and conversations as inputs of a model of transformers, by the tokenizer in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from ao_core import Tokenizer
from ao_core.ext import ConfigError

__all__ = ["tokenizer_of"]


def tokenizer_of(folder: Path) -> Tokenizer | str:
    """The tokenizer of a folder, or why it cannot be loaded; runs no code of the folder."""
    try:
        loaded: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of whatever a tokenizer's files lead to
        text = " ".join(str(error).split())[:160]
        return f"its tokenizer cannot be loaded: {type(error).__name__}: {text}"

    def encode(text: Any) -> list[int]:
        if isinstance(text, str):
            return list(loaded(text, verbose=False)["input_ids"])
        try:
            found = loaded.apply_chat_template(text, tokenize=True, return_dict=True)
        except Exception as error:  # of the template, which is a program
            raise ConfigError(
                f"the chat template refuses messages: {type(error).__name__}: {error}"
            ) from error
        return list(found["input_ids"])

    return Tokenizer(encode, _sample)


def _sample(tokens: Tensor) -> dict[str, Any]:
    return {"input_ids": tokens, "use_cache": False}
