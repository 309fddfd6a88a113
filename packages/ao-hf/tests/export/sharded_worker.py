"""One rank of test_sharded.py: a quantized Llama, sharded with FSDP2, is saved or loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ao_core import quantize_, save_model
from ao_core.testing.programs import one_of_the_ranks
from ao_hf.export.sharded import load_sharded, save_sharded

RECIPES = {
    "int8": "int8_weight_only",
    "nf4": "nf4_weight_only",
    "mx": "mx_weight_only",
}


def make_model(name: str, seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=67,  # does not divide by any number of ranks
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=name == "int8",
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    quantize_(model, RECIPES[name])
    return model


def sharded(model: nn.Module, ranks: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(10).reshape(2, 5)).logits


def main(what: str, folder: Path, *names: str) -> None:
    ranks = dist.get_world_size()
    for name in names:
        here = folder / name
        if what == "save":
            whole = make_model(name, 1)
            if dist.get_rank() == 0:
                save_model(whole, here / "whole", max_shard_size="16KB")
                torch.save(logits(whole), here / "logits.pt")
            dist.barrier()
            model = sharded(make_model(name, 1), ranks)
            save_sharded(model, here / "sharded", max_shard_size="16KB")
        else:
            model = sharded(make_model(name, 2), ranks)
            load_sharded(model, here / "sharded")
            expected = torch.load(here / "logits.pt")
            torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
            save_sharded(model, here / f"again{ranks}", max_shard_size="16KB")
        if dist.get_rank() == 0:
            sys.stdout.write(f"{name}: ok\n")


if __name__ == "__main__":
    import transformers.models.llama  # noqa: F401 - once, before the process is forked

    with one_of_the_ranks(Path(sys.argv[1])):
        main(sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
