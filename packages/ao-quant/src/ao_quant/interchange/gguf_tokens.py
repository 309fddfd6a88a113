"""The tokenizer of a folder of transformers, as the metadata of a GGUF file."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ao_core.ext import CheckpointError, json_object
from ao_core.ext.saving import read_text

__all__ = ["tokenizer_metadata"]

_NORMAL, _CONTROL, _USER, _UNUSED, _BYTE = 1, 3, 4, 5, 6
#: how llama.cpp cuts a text before it merges bytes: by the `model_type`, or by what a vocabulary has
_PRE = {"qwen2": "qwen2", "qwen3": "qwen2"}
_SPECIAL = ("bos", "eos", "unk", "pad")
_GGUF = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def tokenizer_metadata(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys `tokenizer.*`; empty where the folder has no tokenizer.

    Raises:
        CheckpointError: it is of a kind that GGUF has no keys for.
    """
    own = _object(folder / "tokenizer_config.json")
    if (folder / "tokenizer.model").is_file():
        found = _sentencepiece(folder / "tokenizer.model", _added(folder, own))
    elif (folder / "tokenizer.json").is_file():
        found = _byte_pairs(_object(folder / "tokenizer.json"), config)
    else:
        return {}
    tokens = found["tokens"]
    size = int(config.get("vocab_size") or len(tokens))
    if len(tokens) > size:
        raise CheckpointError(f"{folder}: {len(tokens)} tokens, and vocab_size={size}")
    for unused in range(len(tokens), size):  # rows of the embedding without a token
        tokens.append(f"[PAD{unused}]")
        found["token_type"].append(_UNUSED)
        if "scores" in found:
            found["scores"].append(-1000.0)
    keys = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    place = {token: number for number, token in enumerate(tokens)}
    for name in _SPECIAL:
        told = own.get(f"{name}_token")
        text = told.get("content") if isinstance(told, Mapping) else told
        number = place.get(text) if isinstance(text, str) else None
        if number is None and isinstance(config.get(f"{name}_token_id"), int):
            number = config[f"{name}_token_id"]
        if number is not None:
            keys[f"tokenizer.ggml.{_GGUF[name]}_token_id"] = number
    for name in ("bos", "eos"):
        if isinstance(own.get(f"add_{name}_token"), bool):
            keys[f"tokenizer.ggml.add_{name}_token"] = own[f"add_{name}_token"]
    template = own.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = read_text(str(folder / "chat_template.jinja"))
    return keys | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _object(path: Path) -> dict[str, Any]:
    return json_object(read_text(str(path)), path.name) if path.is_file() else {}


def _added(folder: Path, own: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Tokens added to a vocabulary: id -> (text, whether it is special)."""
    told = own.get("added_tokens_decoder") or {}
    found = {int(i): (t["content"], bool(t.get("special"))) for i, t in told.items()}
    for text, number in _object(folder / "added_tokens.json").items():
        found.setdefault(int(number), (text, False))
    return found


def _byte_pairs(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise CheckpointError(
            f"tokenizer.json: a model {model.get('type')!r} with byte_fallback="
            f"{model.get('byte_fallback')!r} is not written to GGUF; a BPE of bytes or a tokenizer.model is"
        )
    vocab = {number: text for text, number in model["vocab"].items()}
    kinds = dict.fromkeys(vocab, _NORMAL)
    for token in tokenizer.get("added_tokens") or ():
        vocab[token["id"]] = token["content"]
        kinds[token["id"]] = _CONTROL if token.get("special") else _USER
    size = max(vocab) + 1
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    found = {
        "model": "gpt2",
        "pre": _pre(tokenizer, config),
        "tokens": [vocab.get(i, f"[PAD{i}]") for i in range(size)],
        "token_type": [kinds.get(i, _UNUSED) for i in range(size)],
    }
    return found | ({"merges": merges} if merges else {})


def _pre(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    if (known := _PRE.get(str(config.get("model_type")))) is not None:
        return known
    steps = tokenizer.get("pre_tokenizer") or {}
    kinds = [step.get("type") for step in steps.get("pretokenizers", [steps])]
    if "Digits" in kinds:
        return "smollm"
    return "llama-bpe" if "Split" in kinds else "gpt-2"


def _sentencepiece(path: Path, added: Mapping[int, tuple[str, bool]]) -> dict[str, Any]:
    """The pieces of a model of SentencePiece: field 1 of its message, each with text, score and kind."""
    tokens, scores, kinds = list[str](), list[float](), list[int]()
    try:
        for number, value in _message(path.read_bytes()):
            if number != 1:
                continue
            piece = dict(_message(value))
            tokens.append(bytes(piece[1]).decode())
            scores.append(struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0])
            kinds.append(int(piece.get(3, _NORMAL)))
    except (KeyError, ValueError, IndexError, struct.error, TypeError) as error:
        raise CheckpointError(f"{path} is no model of SentencePiece, or it is damaged") from error
    for number, (text, special) in sorted(added.items()):
        kind = _CONTROL if special else _USER
        if number < len(tokens):
            tokens[number], kinds[number] = text, kind if kinds[number] != _BYTE else _BYTE
        elif number == len(tokens):
            tokens.append(text)
            scores.append(-1000.0)
            kinds.append(kind)
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
    }


def _message(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number of a field, value) of a message of protobuf: an int, or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or (varint() if kind == 2 else -1)
        if size < 0 or at + size > len(data):
            raise ValueError(f"field of kind {kind}")
        yield key >> 3, data[at : at + size]
        at += size
