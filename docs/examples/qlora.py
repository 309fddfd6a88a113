"""QLoRA with PEFT: an adapter is trained over weights in NF4, then merged."""

from __future__ import annotations

import peft
import torch
import transformers

from ao_core import dequantize_, quantize_

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = transformers.LlamaForCausalLM(config)
report = quantize_(model, "nf4_weight_only")
model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))

tokens = torch.randint(128, (4, 16))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
losses = []
for _ in range(20):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.8 * losses[0]

dequantize_(
    model
)  # a merge into quantized weights would round the adapter to their format
model = model.merge_and_unload()
print(
    f"{len(report.with_status('quantized'))} weights quantized, {len(trained)} trained"
)
