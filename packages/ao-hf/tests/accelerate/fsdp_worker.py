"""One rank of two, sharded by FSDP2 through accelerate. Arguments: a port, and a folder to save into."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
from small import TOKENS, build, empty, logits
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
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
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

    # a quantized model, sharded, saved, and read again whole
    whole = build()
    quantize_(whole, "int8_weight_only")
    said = logits(whole)
    sharded = accelerator.prepare(build_quantized := build())
    del build_quantized
    accelerator.wait_for_everyone()
    ao.save_model(accelerator, model, folder / "adapted")
    if accelerator.is_main_process:
        other = qlora()
        load_model(other, folder / "adapted")
        first = other(input_ids=TOKENS, labels=TOKENS).loss
        assert abs(float(first) - made[-1]) < 0.05
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
