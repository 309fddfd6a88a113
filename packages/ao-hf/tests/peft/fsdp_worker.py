"""One rank of two: what `test_training` starts. Arguments: its rank, and a file to meet at."""

from __future__ import annotations

import copy
import sys
from unittest.mock import patch

import peft
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard

from ao_core import quantize_
from ao_hf.peft import over_quantized, prepare_model_for_kbit_training, variants
from ao_optim import AdamW8bit

STEPS = 3
TOKENS = torch.arange(32).view(2, 16) * 5 % 98 + 1


def build(kind: str) -> nn.Module:
    """The same model on every rank: nf4 in bfloat16, adapters in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=80,
        intermediate_size=104,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=20,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    quantize_(model, "nf4_weight_only")
    model = prepare_model_for_kbit_training(model)
    options = {"r": 4, "target_modules": "all-linear", "use_dora": kind == "dora"}
    return peft.get_peft_model(model, over_quantized(peft.LoraConfig(**options)))


def train(model: nn.Module, tokens: torch.Tensor) -> list[float]:
    """The losses of a few steps, averaged over ranks where the batch is this rank's."""
    optimizer = AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if len(tokens) == 1:
            dist.all_reduce(value)
            value /= 2
        losses.append(float(value))
    return losses


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    for kind in ("lora", "dora"):
        model = build(kind).train()
        expected = train(copy.deepcopy(model), TOKENS)
        for layer in model.modules():
            if type(layer).__name__ == "LlamaDecoderLayer":
                fully_shard(layer)
        fully_shard(model)
        with patch.object(variants, "row_squares", wraps=variants.row_squares) as measured:
            made = train(model, TOKENS[rank : rank + 1])
        assert max(abs(a - b) for a, b in zip(made, expected, strict=True)) < 1e-3, (made, expected)
        assert made[-1] < made[0] - 0.05
        # of each layer at most once, however often its weight is gathered
        assert measured.call_count <= 8, measured.call_count
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
