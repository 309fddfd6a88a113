"""Files that are whole checkpoints: what ONNX and GGUF have besides blocks."""

from __future__ import annotations

import pytest

from ao_core.ext import CheckpointError
from ao_quant.interchange.gguf_tokens import tokenizer_metadata


def test_a_model_of_sentencepiece(tmp_path) -> None:
    def piece(text: str, score: bytes, kind: int) -> bytes:
        inner = (
            b"\x0a" + bytes([len(text)]) + text.encode() + b"\x15" + score + b"\x18" + bytes([kind])
        )
        return b"\x0a" + bytes([len(inner)]) + inner

    pieces = [piece("<unk>", b"\0\0\0\0", 2), piece("<0x0A>", b"\0\0\0\0", 6)]
    pieces.append(piece("a", b"\0\0\x80\xbf", 1))
    (tmp_path / "tokenizer.model").write_bytes(b"".join(pieces) + b"\x12\x02\x08\x01")
    (tmp_path / "added_tokens.json").write_text('{"<end>": 3}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>", "add_bos_token": true}')
    found = tokenizer_metadata(tmp_path, {"vocab_size": 5})
    assert found["tokenizer.ggml.tokens"] == ["<unk>", "<0x0A>", "a", "<end>", "[PAD4]"]
    assert found["tokenizer.ggml.scores"] == [0.0, 0.0, -1.0, -1000.0, -1000.0]
    assert found["tokenizer.ggml.token_type"] == [2, 6, 1, 4, 5]
    assert found["tokenizer.ggml.eos_token_id"] == 3
    assert found["tokenizer.ggml.add_bos_token"] is True
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\xff")
    with pytest.raises(CheckpointError, match="no model of SentencePiece"):
        tokenizer_metadata(tmp_path, {})
