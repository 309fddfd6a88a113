"""Plans are measured on text that they were not made of, and every token of it is quantized."""

from __future__ import annotations

import cache_plan
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def test_windows_do_not_overlap() -> None:
    data, held_out = cache_plan.split(torch.arange(20_000), 6)
    found = torch.cat([*data, *held_out], 1)
    assert [x.shape[1] for x in (*data, *held_out)] == [256] * 4 + [1024] * 6
    assert len(found.unique()) == found.numel()


def test_losses() -> None:
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    network = LlamaForCausalLM(config).eval()
    network.set_attn_implementation("ao_kv")
    windows = [torch.randint(97, (1, 128)) for _ in range(2)]
    exact = [cache_plan.predict(network, window, [None] * 2) for window in windows]
    rows = [
        cache_plan.loss(network, windows, exact, layers)
        for layers in ([None, None], ["kv8", None], ["kv4", "kv4"])
    ]
    assert rows[0]["kl_nats"] == 0
    assert rows[0]["agreement"] == 1
    assert 0 < rows[1]["kl_nats"] < rows[2]["kl_nats"]
