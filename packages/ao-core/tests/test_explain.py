"""`explain`: candidates, winners and reasons, for tensors and models."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import ao_core
from ao_core import WHOLE, ComputeWeight, Kernel, Spec, explain, kernels, quantize_tensor
from ao_core.errors import ConfigError
from ao_core.registry import registry

SPEC = Spec("int4", (1, 32), zero_point="int", layout="packed")


@pytest.fixture
def picky_kernel(monkeypatch):
    """A kernel that serves up to 32 rows and is never available on cuda."""
    monkeypatch.setitem(
        registry.kernels._records,
        "picky",
        Kernel(
            "picky",
            "linear",
            "packed",
            "cpu",
            fn=lambda x, w, bias: x,
            priority=70,
            refuses=lambda call: None if call.m <= 32 else f"serves up to 32 rows, got {call.m}",
        ),
    )
    monkeypatch.setitem(registry.kernels._providers, "picky", "ao-picky")
    ao_core.reopen()
    yield
    monkeypatch.undo()
    ao_core.reopen()


def weight(*shape, dtype=torch.float32, spec=SPEC):
    generator = torch.Generator().manual_seed(0)
    return quantize_tensor(torch.randn(*shape, generator=generator).to(dtype), spec)


def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


class Tied(nn.Module):
    """An embedding whose weight is also the head's, a linear layer and a convolution."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 64), nn.Linear(64, 10, bias=False)
        self.conv, self.norm = nn.Conv1d(4, 4, 3), nn.LayerNorm(64)
        self.embed.weight = self.head.weight = frozen(weight(10, 64))
        self.conv.weight = frozen(weight(4, 4, 3, spec=Spec("int8", (1, -1, -1))))


def test_tensor_without_input_explains_several_batch_sizes(picky_kernel):
    (found,) = explain(weight(8, 64, dtype=torch.bfloat16))
    assert [call.x_shape for call in found.calls] == [(1, 64), (32, 64), (512, 64)]
    assert {call.x_dtype for call in found.calls} == {torch.bfloat16}
    assert [call.winner.kernel.name for call in found.calls[:2]] == ["picky", "picky"]
    refused = found.calls[2].candidates[0]
    assert (refused.provider, refused.refusal) == ("ao-picky", "serves up to 32 rows, got 512")
    assert found.calls[2].winner.kernel.name != "picky"


def test_every_kernel_of_the_row_is_listed_best_first(picky_kernel):
    (found,) = explain(weight(8, 64), torch.zeros(3, 64))
    listed = [c.kernel for c in found.calls[0].candidates]
    expected = {
        k.name
        for k in registry.kernels.values()
        if k.op == "linear" and k.layout in ("*", "packed") and k.device in ("*", "cpu")
    }
    assert {k.name for k in listed} == expected
    assert [k.priority for k in listed] == sorted((k.priority for k in listed), reverse=True)


def test_the_winner_is_the_kernel_that_serves():
    w, x = weight(8, 64), torch.ones(5, 64)
    winner = explain(w, x).weights[0].calls[0].winner.kernel
    torch.testing.assert_close(winner.fn(x, w, None), nn.functional.linear(x, w), rtol=0, atol=0)


def test_input_gives_shape_and_dtype():
    (call,) = explain(weight(8, 64), torch.zeros(2, 3, 64, dtype=torch.float16)).weights[0].calls
    assert (call.op, call.x_shape, call.x_dtype) == ("linear", (2, 3, 64), torch.float16)


def test_integer_input_of_a_tensor_is_a_lookup():
    (call,) = explain(weight(8, 64), torch.zeros(2, 3, dtype=torch.long)).weights[0].calls
    assert (call.op, call.x_shape) == ("embedding", (2, 3))


def test_model_ties_ops_and_other_ranks():
    tied, conv = explain(Tied(), torch.zeros(2, 5, dtype=torch.long))
    assert (tied.fqn, tied.tied) == ("embed.weight", ("head.weight",))
    assert [(call.op, call.x_shape) for call in tied.calls] == [
        ("embedding", (2, 5)),
        ("linear", (2, 5, 64)),
    ]
    assert (conv.fqn, conv.calls) == ("conv.weight", ())
    assert "3 dimensions is dequantized" in conv.note


def test_transposed_view_is_said_to_be_dequantized():
    (found,) = explain(weight(8, 64).t())
    assert found.calls == ()
    assert "transposed" in found.note


def test_pinned_band_is_the_reason(picky_kernel):
    with kernels("reference"):
        (found,) = explain(weight(8, 64))
    assert found.calls[0].winner.kernel.name == "reference_linear"
    assert found.calls[0].candidates[0].refusal == "the band is pinned to 'reference'"


def test_text_names_winner_refusals_and_groups_equal_layers(picky_kernel):
    model = nn.Sequential(*[nn.Linear(64, 8) for _ in range(5)])
    for layer in model:
        layer.weight = frozen(weight(8, 64))
    text = str(explain(model))
    assert text.count("picky (") == 2
    assert "0.weight, 1.weight, 2.weight and 2 more" in text
    assert "→ picky (ao-picky, priority 70)" in text
    assert "linear of (1, 64), (32, 64) float32" in text
    assert "picky (ao-picky, priority 70): serves up to 32 rows, got 512" in text
    assert "would serve it too, at a lower priority" in text


def test_text_where_nothing_serves(picky_kernel):
    with kernels("cuda"):
        text = str(explain(weight(8, 64)))
    assert "no kernel serves it" in text
    assert "→" not in text


def test_dict_is_json(picky_kernel):
    data = json.loads(json.dumps(explain(Tied()).to_dict()))
    first = data["weights"][0]
    assert first["spec"]["dtype"] == "int4"
    assert Spec.from_dict(first["spec"]) == SPEC
    lookup = first["calls"][0]
    assert lookup["op"] == "embedding"
    assert lookup["winner"] in {c["kernel"] for c in lookup["candidates"] if c["refusal"] is None}


def test_nothing_quantized():
    explanation = explain(nn.Linear(4, 4))
    assert explanation.weights == ()
    assert str(explanation) == "nothing here is quantized"


@pytest.mark.parametrize("x", [torch.zeros(3, 5), torch.tensor(1.0)])
def test_input_that_does_not_fit(x):
    with pytest.raises(ConfigError, match="last dimension must be 64"):
        explain(weight(8, 64), x)


def test_neither_model_nor_quantized_tensor():
    with pytest.raises(ConfigError, match="takes a module or a QTensor"):
        explain(torch.zeros(3))


def test_matmuls_of_a_compute_weight():
    row = Spec("f8e4m3", (1, WHOLE), act=Spec("f8e4m3", (1, WHOLE)))
    w = ComputeWeight(torch.zeros(8, 64), row, None, row)
    (found,) = explain(w, torch.zeros(2, 3, 64))
    assert (found.spec, found.shape, found.note) == (None, (8, 64), "in high precision: grad_input")
    assert [(c.matmul, c.x_shape) for c in found.calls] == [
        ("output", (6, 64)),
        ("grad_weight", (8, 6)),
    ]
    assert all(c.winner is not None and c.winner.kernel.op == "mm" for c in found.calls)
    model = nn.Linear(64, 8)
    model.weight = nn.Parameter(w)
    explanation = explain(model, torch.zeros(2, 3, 64))
    assert explanation.weights[0].fqn == "weight"
    assert explanation.weights[0].calls == found.calls
    assert "mm for output, f8e4m3[1×*]" in str(explanation)
    assert json.loads(json.dumps(explanation.to_dict()))["weights"][0]["spec"] is None


def test_matmuls_of_experts():
    row = Spec("f8e4m3", (1, WHOLE), act=Spec("f8e4m3", (1, WHOLE)))
    w = ComputeWeight(torch.zeros(3, 8, 64), row, row, row)
    (found,) = explain(w, torch.zeros(6, 64))
    assert found.shape == (3, 8, 64)
    assert {(c.matmul, c.op, c.x_shape) for c in found.calls} == {
        ("output", "grouped_mm", (6, 64)),
        ("grad_input", "grouped_mm", (6, 8)),
        ("grad_weight", "grouped_mm", (8, 6)),
    }
    assert all(c.winner is not None for c in found.calls)
