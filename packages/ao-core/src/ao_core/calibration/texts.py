"""Calibration data from files of text: windows of tokens, as inputs of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ao_core.calibration.samples import Sample
from ao_core.errors import ConfigError
from ao_core.folder_records import Tokenizer
from ao_core.regular_files import read_text

__all__ = ["TOKENS", "WINDOW", "batches_of_file"]

#: tokens that are used unless told otherwise, and how many of them are one input
TOKENS, WINDOW = 32_768, 2_048
_JSONL = (".jsonl", ".ndjson")
_FIELDS = ("input_ids", "messages", "text")


def batches_of_file(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    tokens: int | None = None,
    window: int = WINDOW,
    seed: int = 0,
) -> list[Sample]:
    """Windows of the tokens of a file, drawn without replacement.

    Texts are encoded one by one, joined in the order of the file and cut into windows, of which some are
    drawn at random; what is left at the end is not used.

    Args:
        path: a .jsonl file of objects, one per line, each with "text", "messages" or "input_ids"; any other
            file is one text, in UTF-8.
        tokenizer: of the model.
        tokens: how many are used; None: 32,768, or as many whole windows as there are if they are fewer.
        window: tokens of an input.
        seed: of the draw. The windows stay in the order of the file.

    Raises:
        ConfigError: the file cannot be read or has a line that is none of these, or it has too few tokens.
    """
    if window < 1 or (tokens is not None and tokens < window):
        raise ConfigError(
            f"tokens={tokens!r}, window={window!r}: need at least one window, of at least one token"
        )
    found: list[int] = []
    for ids in _encoded(Path(path), tokenizer):
        found += ids
    there = len(found) // window
    wanted = (tokens or TOKENS) // window
    if there < (wanted if tokens is not None else 1):
        raise ConfigError(
            f"data={str(path)!r} has {len(found)} tokens, which are {there} windows of {window}; "
            f"{max(wanted, 1)} are needed: give a longer text, fewer tokens or a smaller window"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(there, generator=generator, device="cpu")[:wanted].sort().values
    rows = torch.tensor(found[: there * window], dtype=torch.int64, device="cpu").view(
        there, window
    )
    return [tokenizer.sample(rows[number : number + 1].clone()) for number in drawn.tolist()]


def _encoded(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of each text of a file."""
    text = read_text(str(path))
    if path.suffix not in _JSONL:
        yield tokenizer.encode(text)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _of_line(f"data={str(path)!r}, line {number}", line, tokenizer)


def _of_line(place: str, line: str, tokenizer: Tokenizer) -> list[int]:
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: no JSON: {error}") from error
    name = next((n for n in _FIELDS if isinstance(fields, dict) and n in fields), None)
    if name is None:
        raise ConfigError(f"{place}: need an object with one of {', '.join(map(repr, _FIELDS))}")
    value = fields[name]
    if name == "input_ids":
        if not isinstance(value, list) or not all(
            type(each) is int and each >= 0 for each in value
        ):
            raise ConfigError(f"{place}: 'input_ids' must be a list of tokens, which are integers")
        return value
    if name == "text" and not isinstance(value, str):
        raise ConfigError(f"{place}: 'text' must be a string")
    if name == "messages" and not (
        isinstance(value, list) and all(isinstance(e, dict) for e in value)
    ):
        raise ConfigError(
            f"{place}: 'messages' must be a list of objects with 'role' and 'content'"
        )
    try:
        return tokenizer.encode(value)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
