"""Heads and features of the real model are cut out."""

from __future__ import annotations

import torch
from minilm_demo import minilm

from ao_sparsity import ln_structured, remove_channels


def test_half_of_minilm() -> None:
    model = minilm.load()
    (batch,) = minilm.tokenize(["A cat sat on the mat.", "It rains."], 16)
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
    smaller, report = remove_channels(model, inputs, ln_structured(model, inputs, 0.5), strict=True)
    assert [(g.size, len(g.channels)) for g in report.removed] == [(12, 6), (1536, 768)] * 6
    assert report.parameters[0] - report.parameters[1] == 6 * (
        4 * 192 * 384 + 3 * 192 + 2 * 768 * 384 + 768
    )
    assert report.difference < 1e-5
    others = minilm.tokenize(
        ["Another text, of another length, than those it was traced with."], 32
    )
    vectors = minilm.encode(smaller, others)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(1))
