"""One rank of two, sharded by FSDP2 through accelerate. Argument: a folder to save into."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
from small import TOKENS, build
from torch.distributed.tensor import DTensor

import ao_hf.accelerate as ao
from ao_core import QTensor, load_model, quantize_
from ao_optim import AdamW8bit


def qlora() -> Any:
    model = build()
    quantize_(model, "nf4_weight_only")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def steps(model: Any, optimizer: Any, backward: Any, batch: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(4):
        loss = model(input_ids=batch, labels=batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def trained(model: Any) -> AdamW8bit:
    return AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=5e-3)


def main() -> None:
    folder = Path(sys.argv[1])
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = accelerate.Accelerator(cpu=True)
    # on devices of other kinds the argument `fsdp_plugin` does this; on CPUs accelerate ignores it
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2
    assert accelerator.num_processes == 2

    # both ranks see the same rows, so two are equal to one
    alone = qlora()
    expected = steps(alone, trained(alone), lambda loss: loss.backward(), TOKENS)
    model = qlora()
    model, optimizer = accelerator.prepare(model, trained(model))
    local = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    assert any(isinstance(p, QTensor) for p in local)
    made = steps(model, optimizer, accelerator.backward, TOKENS)
    assert made[-1] < made[0] - 0.02, made
    assert max(abs(a - b) for a, b in zip(made, expected, strict=True)) < 1e-3, (made, expected)

    # gathered, saved, and read again whole: quantized weights keep their codes
    with torch.no_grad():
        said = model(input_ids=TOKENS).logits
    ao.save_model(accelerator, model, folder)
    if accelerator.is_main_process:
        other = qlora()
        load_model(other, folder)
        frozen = [n for n, p in alone.named_parameters() if isinstance(p, QTensor)]
        assert frozen
        for name in frozen:
            assert torch.equal(other.get_parameter(name), alone.get_parameter(name)), name
        with torch.no_grad():
            assert (other(input_ids=TOKENS).logits - said).abs().max() < 1e-4
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
