"""Every module of torch that holds a weight, in every kind of format: one table."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ao_core import QTensor, dequantize_, load_model, quantize_, save_model

#: one of each kind: integers, a codebook, floats of 8 and 6 bits, MX, a learned table, activations
FORMATS = (
    "int8_weight_only",
    "int4_weight_only",
    "nf4_weight_only",
    "float8_weight_only",
    "fp6_llm_weight_only",
    "mx_weight_only",
    "codebook_weight_only",
    "int8_dynamic_activation_int8_weight",
)
DYNAMIC = FORMATS[-1]


class Conv1D(nn.Module):
    """What transformers calls so: a linear layer whose weight is stored (in, out)."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, out: int, inp: int) -> None:
        super().__init__()
        self.out = out
        self.weight = nn.Parameter(torch.randn(inp, out))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.out)


class Weighted(nn.Module):
    """Sums of embeddings with a weight for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(19, 41, mode="sum")

    def forward(self, shares):
        return self.bag(torch.tensor([[0, 3, 3], [18, 1, 0]]), per_sample_weights=shares)


def ids():
    return torch.tensor([[0, 3, 3], [18, 1, 0]])


#: name -> module, its inputs, and whether activations can be quantized
MODULES = {
    "embedding": (lambda: nn.Embedding(19, 41), lambda: (ids(),), False),
    "bag": (lambda: nn.EmbeddingBag(19, 41), lambda: (ids(),), False),
    "bag-max": (lambda: nn.EmbeddingBag(19, 41, mode="max"), lambda: (ids(),), False),
    "bag-weighted": (Weighted, lambda: (torch.rand(2, 3),), False),
    "conv1d": (lambda: nn.Conv1d(6, 7, 3), lambda: (torch.randn(2, 6, 9),), False),
    "conv2d": (lambda: nn.Conv2d(6, 9, 3, groups=3), lambda: (torch.randn(2, 6, 9, 7),), False),
    "conv3d": (lambda: nn.Conv3d(3, 5, (1, 3, 2)), lambda: (torch.randn(2, 3, 4, 5, 6),), False),
    "transposed1d": (lambda: nn.ConvTranspose1d(6, 7, 3), lambda: (torch.randn(2, 6, 5),), False),
    "transposed2d": (
        lambda: nn.ConvTranspose2d(6, 9, 3, groups=3, stride=2, output_padding=1),
        lambda: (torch.randn(2, 6, 5, 4),),
        False,
    ),
    "transposed3d": (
        lambda: nn.ConvTranspose3d(4, 5, (1, 3, 2)),
        lambda: (torch.randn(2, 4, 3, 4, 5),),
        False,
    ),
    "bilinear": (
        lambda: nn.Bilinear(11, 13, 5),
        lambda: (torch.randn(3, 11), torch.randn(3, 13)),
        False,
    ),
    "lstm": (
        lambda: nn.LSTM(11, 13, 2, batch_first=True, bidirectional=True),
        lambda: (torch.randn(2, 5, 11),),
        True,
    ),
    "lstm-projected": (lambda: nn.LSTM(11, 13, proj_size=6), lambda: (torch.randn(2, 11),), True),
    "gru": (lambda: nn.GRU(11, 13), lambda: (torch.randn(5, 2, 11),), True),
    "rnn": (lambda: nn.RNN(11, 13), lambda: (torch.randn(5, 2, 11),), True),
    "lstm-cell": (lambda: nn.LSTMCell(11, 13), lambda: (torch.randn(3, 11),), True),
    "gru-cell": (lambda: nn.GRUCell(11, 13), lambda: (torch.randn(3, 11),), True),
    "rnn-cell": (lambda: nn.RNNCell(11, 13), lambda: (torch.randn(3, 11),), True),
    "transformers-conv1d": (lambda: Conv1D(13, 70), lambda: (torch.randn(2, 3, 70),), True),
}


def first(out):
    return out[0] if isinstance(out, tuple) else out


def weights(model):
    return {name: p for name, p in model.named_parameters() if p.dim() > 1}


def with_values(make, quantized):
    """The module anew, with the values that the quantized one stands for."""
    twin = make()
    state = quantized.state_dict()
    dense = {k: v.dequantize() if isinstance(v, QTensor) else v for k, v in state.items()}
    twin.load_state_dict(dense)
    return twin.requires_grad_(False)


def quantized(make, name):
    model = make().requires_grad_(False)
    return model, quantize_(model, name, lambda module, fqn: True)


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # of torch, on CPUs
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", MODULES)
def test_outputs_and_input_gradients_are_those_of_the_stored_values(kind, name, sqnr_db):
    make, inputs, linear = MODULES[kind]
    model, report = quantized(make, name)
    if name == DYNAMIC and not linear:
        assert {r.status for r in report if len(r.shape) > 1} == {"skipped"}
        assert all(record.reason for record in report.with_status("skipped"))
    else:
        assert all(isinstance(p, QTensor) for p in weights(model).values())
    twin, x = with_values(make, model), inputs()
    bound = 25 if name == DYNAMIC and linear else 115  # dB; the order of sums may differ
    with torch.no_grad():
        out, expected = first(model(*x)), first(twin(*x))
        assert torch.equal(out, expected) or sqnr_db(expected, out) > bound
    if not x[0].is_floating_point():
        return
    ours, theirs = ([t.clone().requires_grad_() for t in x] for _ in range(2))
    first(model(*ours)).square().sum().backward()
    first(twin(*theirs)).square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad) or sqnr_db(b.grad, a.grad) > bound


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", ["int4_weight_only", "mx_weight_only"])
@pytest.mark.parametrize("kind", MODULES)
def test_copies_and_files_hold_the_same(tmp_path, kind, name):
    make, inputs, _ = MODULES[kind]
    model, _ = quantized(make, name)
    x = inputs()
    save_model(model, tmp_path)
    loaded = make().requires_grad_(False)
    load_model(loaded, tmp_path)
    for other in (copy.deepcopy(model), loaded):
        assert all(isinstance(p, QTensor) for p in weights(other).values())
        with torch.no_grad():
            torch.testing.assert_close(first(other(*x)), first(model(*x)), rtol=1e-6, atol=1e-6)


COMPILED = [kind for kind in MODULES if kind not in ("lstm", "lstm-projected", "gru", "rnn")]


@pytest.mark.parametrize("kind", COMPILED)
def test_compiles_as_one_graph(kind):
    """Recurrent layers of several steps do not: Dynamo leaves them out."""
    make, inputs, _ = MODULES[kind]
    model, _ = quantized(make, "int4_weight_only")
    x = inputs()
    torch._dynamo.reset()
    with torch.no_grad():
        out = first(torch.compile(model, fullgraph=True, backend="aot_eager")(*x))
        torch.testing.assert_close(out, first(model(*x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [MODULES["lstm"][0], MODULES["gru"][0]])
def test_recurrent_layers_do_not_keep_their_dense_weights(make):
    model, _ = quantized(make, "int8_weight_only")
    for name, listed in zip(model._flat_weights_names, model._flat_weights, strict=True):
        assert listed is getattr(model, name)
    dequantize_(model)
    assert not any(isinstance(listed, QTensor) for listed in model._flat_weights)


def test_groups_of_a_transposed_weight_run_along_its_inputs():
    model = Conv1D(13, 70)
    dense = model.weight.detach().clone()
    report = quantize_(model, "int4_weight_only")
    assert [r.status for r in report] == ["changed", "unchanged"]
    assert (model.weight.stored_shape, model.weight.shape) == ((13, 70), (70, 13))
    linear = nn.Linear(70, 13)
    linear.weight = nn.Parameter(dense.t().contiguous())
    quantize_(linear, "int4_weight_only")
    assert torch.equal(model.weight.dequantize(), linear.weight.dequantize().t())


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("name", ["int4_weight_only", DYNAMIC])
def test_rows_that_each_lookup_rescales_are_skipped(layer, name):
    model, report = quantized(lambda: layer(19, 41, max_norm=1.0), name)
    (record,) = report
    assert record.status == "skipped"
    assert record.reason.startswith("max_norm rescales its rows")
    model(ids())
