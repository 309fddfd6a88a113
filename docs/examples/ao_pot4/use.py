"""Everything below is generic: nothing in ao-core knows of pot4."""

import torch
from torch import nn

from ao_core import load_model, quantize_, save_model

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
x = torch.randn(64, 256, requires_grad=True)
dense = model(x)

report = quantize_(model, "pot4_weight_only")
print(report)

y = model(x)
y.sum().backward()  # gradients reach the input, as LoRA needs it
error_db = 20 * torch.log10(dense.norm() / (dense - y).norm())
print(f"output SQNR {error_db:.1f} dB, input gradient {tuple(x.grad.shape)}")

save_model(model, "pot4-checkpoint")
with torch.device("meta"):
    again = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
load_model(again, "pot4-checkpoint")
compiled = torch.compile(again, fullgraph=True)
assert torch.equal(again(x), y)
assert torch.allclose(compiled(x), y, atol=1e-5)
print("saved, loaded and compiled: the same result")
