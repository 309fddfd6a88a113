"""Weights that read the same input as one weight around the same memory."""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext.kernels import cannot_join_rows, join_rows, share_rows
from ao_core.testing.base import gaussian

ROW = Spec("int8", (1, WHOLE))
GROUPS = Spec("uint4", (1, 16), "bfloat16", "int", "packed")


def weight(rows: int, spec: Spec, k: int = 40, seed: int = 0) -> QTensor:
    return quantize_tensor(gaussian((rows, k), seed=seed), spec)


@pytest.mark.parametrize("spec", [ROW, GROUPS], ids=str)
def test_joined_weights_have_the_rows_of_all_and_share_their_memory(spec: Spec) -> None:
    weights = [weight(rows, spec, seed=rows) for rows in (5, 3, 8)]
    values = [w.dequantize() for w in weights]
    assert cannot_join_rows(weights) is None
    joint = join_rows(weights)
    assert torch.equal(joint.dequantize(), torch.cat(values))
    share_rows(joint, weights)
    for one, before in zip(weights, values, strict=True):
        assert torch.equal(one.dequantize(), before)
        for name, part in one.parts.items():
            place = part.untyped_storage().data_ptr()
            assert place == joint.parts[name].untyped_storage().data_ptr()
    with torch.no_grad():
        weights[1].zero_()
    assert torch.equal(joint.dequantize()[5:8], torch.zeros(3, 40))
    assert torch.equal(joint.dequantize()[8:], values[2])


@pytest.mark.parametrize(
    ("spec", "k", "reason"),
    [
        (GROUPS, 40, "the formats differ"),
        (ROW, 48, "the formats differ"),
        (Spec("int8", (WHOLE, WHOLE)), 40, "the formats differ"),
    ],
    ids=["format", "columns", "block"],
)
def test_weights_of_two_kinds_are_refused(spec: Spec, k: int, reason: str) -> None:
    assert reason in str(cannot_join_rows([weight(4, ROW), weight(4, spec, k)]))


def test_weights_that_share_a_scale_over_rows_or_are_transposed_are_refused() -> None:
    tensor = Spec("int8", (WHOLE, WHOLE))
    reason = cannot_join_rows([weight(4, tensor), weight(4, tensor, seed=1)])
    assert reason == "the layout 'plain' does not store whole rows one after the other"
    turned = [weight(4, ROW).t(), weight(4, ROW).t()]
    assert "transposed" in str(cannot_join_rows(turned))
    nested = Spec("int8", (1, 8), Spec("int8", (1, WHOLE)))
    assert "quantized themselves" in str(cannot_join_rows([weight(4, nested), weight(4, nested)]))
