"""The model beside an independent computation in float64, and beside transformers' Llama."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from bytelm import model as bytelm_model
from bytelm.model import ByteLM, ModelConfig, rope_angles, rotate
from safetensors import safe_open

IDS = torch.tensor([[97, 0, 255, 13, 97, 98, 99, 7, 200, 1, 32], list(range(40, 51))])


def softmax(x: np.ndarray) -> np.ndarray:
    power = np.exp(x - x.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True)


def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain


def turn(vector: np.ndarray, position: int) -> np.ndarray:
    """RoPE as products of complex numbers."""
    half = len(vector) // 2
    number = vector[:half] + 1j * vector[half:]
    angle = position * 10_000.0 ** (-np.arange(half) / half)
    turned = number * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag])


def reference(model: ByteLM, ids: list[int]) -> np.ndarray:
    """Logits (T, 256), position by position and head by head."""
    c = model.config
    w = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}."
        normed = norm(x, w[at + "input_layernorm.weight"])
        q, k, v = (normed @ w[f"{at}self_attn.{n}_proj.weight"].T for n in "qkv")
        out = np.zeros_like(x)
        for head in range(c.num_attention_heads):
            mine = slice(head * c.head_dim, (head + 1) * c.head_dim)
            kv_head = head * c.num_key_value_heads // c.num_attention_heads
            shared = slice(kv_head * c.head_dim, (kv_head + 1) * c.head_dim)
            keys = np.array([turn(k[t, shared], t) for t in range(len(ids))])
            for t in range(len(ids)):
                scores = keys[: t + 1] @ turn(q[t, mine], t) / np.sqrt(c.head_dim)
                out[t, mine] = softmax(scores) @ v[: t + 1, shared]
        x = x + out @ w[at + "self_attn.o_proj.weight"].T
        normed = norm(x, w[at + "post_attention_layernorm.weight"])
        gate, up = (normed @ w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def test_logits_equal_the_reference(model: ByteLM) -> None:
    found = model.double()(IDS).detach().numpy()
    expected = np.stack([reference(model, ids) for ids in IDS.tolist()])
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_float32_is_near_the_reference(model: ByteLM) -> None:
    found = model(IDS).detach().numpy()
    expected = np.stack([reference(model, ids) for ids in IDS.tolist()])
    assert 0 < np.abs(found - expected).max() < 1e-4


def test_attention_sees_the_past_only(model: ByteLM) -> None:
    changed = IDS.clone()
    changed[:, 6] ^= 1
    before, after = model.double()(IDS), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(-1).all()


def test_rotary_products_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    angles = rope_angles(50, 10, 10_000.0)
    turned = [rotate(x, angles.cos(), angles.sin()) for x in (q, k)]
    matmuls = turned[0] @ turned[1].T
    for distance in (-30, 0, 7):
        diagonal = matmuls.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-13)
    assert matmuls.std() > 0.1


@pytest.mark.parametrize("seed", [0, 1])
def test_initial_weights_depend_on_the_seed_alone(config: ModelConfig, seed: int) -> None:
    models = [ByteLM(config) for _ in range(3)]
    for model, used in zip(models, (seed, seed, seed + 1), strict=True):
        bytelm_model.initialize(model, used)
    first, again, other = (model.lm_head.weight for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.018 < float(first.detach().std()) < 0.022


def test_saved_and_loaded(model: ByteLM, tmp_path: Path) -> None:
    bytelm_model.save(model, tmp_path / "new" / "folder")
    loaded = bytelm_model.load(tmp_path / "new" / "folder")
    assert loaded.config == model.config
    for name, parameter in loaded.named_parameters():
        expected = model.get_parameter(name).bfloat16().float()
        assert torch.equal(parameter, expected), name
        assert not parameter.requires_grad


def test_transformers_reads_the_files_and_agrees(model: ByteLM, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    bytelm_model.save(model, tmp_path)
    llama = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        found, expected = bytelm_model.load(tmp_path)(IDS), llama(IDS).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_file_is_bfloat16_and_names_its_architecture(model: ByteLM, tmp_path: Path) -> None:
    bytelm_model.save(model, tmp_path)
    with safe_open(tmp_path / bytelm_model.WEIGHTS, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in model.state_dict()} == {"BF16"}
    config = json.loads((tmp_path / bytelm_model.CONFIG).read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
