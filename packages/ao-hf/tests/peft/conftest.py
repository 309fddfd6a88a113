"""Small models with adapters over quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from ao_core import quantize_
from ao_hf.peft import over_quantized

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What these libraries deprecate of each other is theirs to mend."""
    for item in items:
        if item.path.parent == HERE:
            for kind in ("FutureWarning", "DeprecationWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


class Layers(nn.Module):
    """Two linear layers of ragged sizes, with biases, and one of its own for long blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 56), nn.Linear(56, 40)
        self.wide = nn.Linear(256, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


@pytest.fixture
def layers() -> Callable[..., tuple[nn.Module, dict[str, Tensor]]]:
    """Makes two layers with adapters that do something, and says what the weights were at first."""

    def build(
        recipe: object, dtype: torch.dtype = torch.float32, **options: object
    ) -> tuple[nn.Module, dict[str, Tensor]]:
        model = Layers().to(dtype)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        quantize_(model, recipe)
        options = {"r": 4, "target_modules": ["up", "down"], "init_lora_weights": False} | options
        return peft.get_peft_model(model, over_quantized(peft.LoraConfig(**options))), before

    return build


@pytest.fixture
def llama() -> Callable[..., nn.Module]:
    """Makes a Llama of one layer, the same at every call of a test."""

    def build(dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=99,
            hidden_size=80,
            intermediate_size=104,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=20,
            max_position_embeddings=64,
            pad_token_id=0,
            **options,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return transformers.LlamaForCausalLM(config).to(dtype).eval()

    return build
