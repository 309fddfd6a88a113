"""Files by the names, and with the rows, of models of transformers."""

from __future__ import annotations

import gguf
import pytest
import torch

from ao_core import QTensor
from ao_core.ext import CheckpointError, ConfigError
from ao_quant.gguf import read_gguf, write_gguf

HEADS, KV, WIDTH, K = 4, 2, 8, 64


def _file(path, architecture="llama", **more):
    """A block of a model as llama.cpp's converter writes it, with rows that say where they were."""
    metadata = {
        "general.architecture": architecture,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV,
    } | more
    torch.manual_seed(0)
    rows = {"attn_q": HEADS * WIDTH, "attn_k": KV * WIDTH, "attn_v": KV * WIDTH}
    tensors = {"token_embd.weight": torch.randn(10, K), "rope_freqs.weight": torch.ones(4)}
    for name, count in rows.items():
        tensors[f"blk.0.{name}.weight"] = torch.randn(count, K)
        tensors[f"blk.0.{name}.bias"] = torch.randn(count)
    tensors |= {"blk.0.ffn_norm.weight": torch.randn(K), "output_norm.weight": torch.randn(K)}
    write_gguf(path, tensors, {key: value for key, value in metadata.items() if value is not None})
    return tensors


def _permuted(weight, heads):
    """As llama.cpp's converter does: rows i and i + d/2 of a head next to each other."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize(("architecture", "moved"), [("llama", True), ("qwen2", False)])
def test_names_and_rows(tmp_path, architecture, moved):
    raw = _file(tmp_path / "a.gguf", architecture)
    found = read_gguf(tmp_path / "a.gguf", names="transformers").tensors
    assert list(found)[:3] == [
        "model.embed_tokens.weight", "rope_freqs.weight", "model.layers.0.self_attn.q_proj.weight",
    ]  # fmt: skip
    for name, heads in (("q", HEADS), ("k", KV)):
        for kind in ("weight", "bias"):
            here = found[f"model.layers.0.self_attn.{name}_proj.{kind}"]
            there = raw[f"blk.0.attn_{name}.{kind}"]
            assert torch.equal(_permuted(here, heads) if moved else here, there)
            assert torch.equal(here, there) == (not moved)
    assert torch.equal(found["model.layers.0.self_attn.v_proj.weight"], raw["blk.0.attn_v.weight"])
    assert torch.equal(
        found["model.layers.0.post_attention_layernorm.weight"], raw["blk.0.ffn_norm.weight"]
    )
    assert set(read_gguf(tmp_path / "a.gguf").tensors) == set(raw)


def test_gains_of_norms_of_gemma(tmp_path):
    """Its files have 1 more than the model; names of norms differ from those of other models."""
    gains, places = torch.randn(8).bfloat16(), {
        "model.norm": "output_norm",
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
        "model.layers.0.post_attention_layernorm": "blk.0.post_attention_norm",
        "model.layers.0.pre_feedforward_layernorm": "blk.0.ffn_norm",
        "model.layers.0.post_feedforward_layernorm": "blk.0.post_ffw_norm",
        "model.layers.0.self_attn.q_norm": "blk.0.attn_q_norm",
    }  # fmt: skip
    tensors = {f"{name}.weight": gains for name in places}
    metadata = {"general.architecture": "gemma3"}
    write_gguf(tmp_path / "a.gguf", tensors, metadata, names="transformers")
    raw = read_gguf(tmp_path / "a.gguf").tensors
    assert list(raw) == [f"{name}.weight" for name in places.values()]
    assert all(torch.equal(tensor, gains.float() + 1) for tensor in raw.values())
    found = read_gguf(tmp_path / "a.gguf", names="transformers").tensors
    assert list(found) == list(tensors)
    assert all(torch.equal(tensor, gains.float()) for tensor in found.values())


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_0"])
def test_quantized_rows_and_the_same_bytes_again(tmp_path, kind):
    """As transformers undoes it after dequantizing; what is read and written is the file."""
    path, again = tmp_path / "a.gguf", tmp_path / "b.gguf"
    dense = torch.randn(HEADS * WIDTH, K)
    blocks = gguf.quants.quantize(_permuted(dense, HEADS).numpy(), gguf.GGMLQuantizationType[kind])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    for name in ("attn_q", "attn_k", "attn_v"):
        writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors, metadata = read_gguf(path, names="transformers")
    q, v = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qv")
    assert isinstance(q, QTensor)
    assert torch.equal(_permuted(q.dequantize(), HEADS), v.dequantize())
    assert (q.dequantize() - dense).abs().max() < 0.4
    write_gguf(again, tensors, metadata, names="transformers")
    assert again.read_bytes() == path.read_bytes()


def test_what_is_not_known_is_an_error(tmp_path):
    path = tmp_path / "a.gguf"
    _file(path)
    with pytest.raises(ConfigError, match=r"names='hf'.*'file', 'transformers'"):
        read_gguf(path, names="hf")
    _file(path, "phi3")
    with pytest.raises(
        CheckpointError, match=r"'phi3'.*llama, qwen2, qwen3, gemma, gemma3; use names='file'"
    ):
        read_gguf(path, names="transformers")
    _file(path, **{"llama.attention.head_count": None})
    with pytest.raises(CheckpointError, match=r"head_count' is None.*attn_q"):
        read_gguf(path, names="transformers")
    metadata = {"general.architecture": "llama"}
    with pytest.raises(CheckpointError, match="'lm_head.bias.x' of 'llama'"):
        write_gguf(path, {"lm_head.bias.x": torch.ones(2)}, metadata, names="transformers")
