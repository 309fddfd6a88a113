"""The application in this process, a small configuration of its own, and checkpoints to work on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import ao_core
from ao_core import Config, Recipe, Skip, Spec, Transform, quantize_tensor
from ao_core.cli.app import make_app
from ao_core.errors import ConfigError


@dataclass(frozen=True)
class SmallConfig(Config):
    """Weights in 4 bits, for these tests."""

    group_size: int | str = 32
    symmetric: bool = True
    widths: tuple[int, ...] = (4,)
    note: str | None = None

    def __post_init__(self):
        if self.group_size not in (16, 32, "row"):
            raise ConfigError(f"group_size={self.group_size!r}: use 16, 32 or 'row'")


def apply(dense, config, target):
    if dense.shape[-1] % 2:
        return Skip(f"{type(target.module).__name__} of odd width {dense.shape[-1]}")
    block = (1, -1) if config.group_size == "row" else (1, config.group_size)
    zero_point = "none" if config.symmetric else "int"
    return quantize_tensor(dense, Spec("int4", block, zero_point=zero_point, layout="packed"))


@pytest.fixture(scope="session", autouse=True)
def small_config():
    ao_core.register(Transform(SmallConfig, "small4", 1, apply))
    ao_core.register(Recipe("small4/row", SmallConfig(group_size="row"), "one scale per row"))
    return SmallConfig


@pytest.fixture
def ao():
    """Call the command with arguments; returns its result."""
    runner, app = CliRunner(), make_app()
    return lambda *args: runner.invoke(app, [str(arg) for arg in args])


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "embed_tokens.weight": normal(50, 64),
        "layers.0.attn.q_proj.weight": normal(64, 64).bfloat16(),
        "layers.0.attn.q_proj.bias": normal(64),
        "layers.0.mlp.experts.gate_up_proj": normal(3, 32, 64),
        "layers.0.norm.weight": normal(64),
        "layers.0.odd.weight": normal(8, 7),
        "layers.0.rotary": normal(2, 3, 4),
        "conv1.weight": normal(8, 4, 6),
        "position_ids": torch.arange(10),
        "lm_head.weight": normal(50, 64),
    }


@pytest.fixture
def source(tmp_path, tensors):
    """A directory as Hugging Face publishes them."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model": "small"}')
    (folder / "tokenizer.model").write_bytes(b"tokens")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder
