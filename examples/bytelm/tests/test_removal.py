"""Half of the heads and of the MLPs of the byte-level model are cut out."""

from __future__ import annotations

import torch
from bytelm.model import ByteLM, ModelConfig, initialize

from ao_sparsity import ln_structured, remove_channels


def test_heads_and_features_go() -> None:
    config = ModelConfig(64, 96, 2, num_attention_heads=8, num_key_value_heads=4)
    model = ByteLM(config)
    initialize(model, 0)
    ids = torch.randint(0, 256, (2, 11), generator=torch.Generator().manual_seed(0))
    smaller, report = remove_channels(model, ids, ln_structured(model, ids, 0.5), strict=True)
    assert [(g.size, len(g.channels)) for g in report.removed] == [(4, 2), (96, 48)] * 2
    layer = smaller.model.layers[1]
    assert layer.self_attn.q_proj.weight.shape == (32, 64)
    assert layer.self_attn.k_proj.weight.shape == (16, 64)
    assert layer.mlp.down_proj.in_features == 48
    longer = torch.cat([ids, ids], dim=1)  # than what it was traced with
    assert smaller(longer).shape == (2, 22, 256)
