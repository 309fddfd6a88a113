"""One rank of two: what `test_distributed` starts. Arguments: its rank, and a file to meet at."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable

import peft
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from zoo import MODELS, language_model

from ao_core import QTensor, quantize_
from ao_core.ext import stochastic_rounding
from ao_optim import AdamW8bit

STEPS = 3


def tokens(rank: int) -> torch.Tensor:
    return MODELS["llama"].inputs()["input_ids"].roll(rank, 1)


def train(
    model: nn.Module, rank: int, optimizer: Callable[..., torch.optim.Optimizer]
) -> list[float]:
    steps = optimizer([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens(rank), labels=tokens(rank)).loss
        loss.backward()
        steps.step()
        steps.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def adapter(recipe: str) -> nn.Module:
    model = language_model()
    quantize_(model, recipe)
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def converted(recipe: str) -> nn.Module:
    model = language_model()
    quantize_(model, recipe)
    return model


def check_ddp(
    build: Callable[[], nn.Module], rank: int, optimizer: type[torch.optim.Optimizer]
) -> None:
    """The ranks stay equal, learn, and the quantized weights are what they were."""
    model = build()
    before = {
        n: p.dequantize()
        for n, p in model.named_parameters()
        if isinstance(p, QTensor) and not p.requires_grad
    }
    losses = train(DistributedDataParallel(model), rank, optimizer)
    assert losses[-1] < losses[0], losses
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        values = values.dequantize() if isinstance(values, QTensor) else values
        if name in before:
            assert torch.equal(values, before[name]), name
        both = [torch.empty_like(values) for _ in range(2)]
        dist.all_gather(both, values.clone())
        assert torch.equal(*both), f"{name} differs between the ranks"


def check_fsdp(build: Callable[[], nn.Module], rank: int, policy: MixedPrecisionPolicy) -> None:
    """Sharded training has the losses of DDP but for the order of sums, and of rounding to bfloat16."""
    expected = train(DistributedDataParallel(build()), rank, torch.optim.AdamW)
    model = build()
    for layer in model.modules():
        if type(layer).__name__ == "LlamaDecoderLayer":
            fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    made = train(model, rank, torch.optim.AdamW)
    tolerance = 1e-4 if policy.param_dtype is None else 0.05
    assert max(abs(a - b) for a, b in zip(made, expected, strict=True)) < tolerance, (
        made,
        expected,
    )


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=2,
        init_method=f"file://{store}",
        timeout=datetime.timedelta(seconds=120),
    )
    for recipe in ("nf4_weight_only", "int4_weight_only/g32-asymmetric", "int8_weight_only"):
        check_ddp(lambda name=recipe: adapter(name), rank, torch.optim.AdamW)
    for recipe in ("float8/rowwise", "int8_mixed_precision_training", "bitnet_training"):
        check_ddp(lambda name=recipe: converted(name), rank, AdamW8bit)
    with stochastic_rounding(torch.Generator().manual_seed(0)):
        check_ddp(lambda: converted("int8_weight_only_training"), rank, torch.optim.AdamW)
    plain, bf16 = MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for recipe in ("nf4_weight_only", "int8_weight_only"):
        for policy in (plain, bf16):
            check_fsdp(lambda name=recipe: adapter(name), rank, policy)
    for recipe in ("float8/rowwise", "int8_mixed_precision_training"):
        check_fsdp(lambda name=recipe: converted(name), rank, bf16)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
