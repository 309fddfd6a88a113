"""Inputs of experts and of convolutions: against direct matmuls; what becomes of experts that saw few."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core.calibration.gathering import collect
from ao_core.calibration.matrices import matrices, unmatrices
from ao_core.calibration.observing import observing
from ao_core.calibration.statistics import HESSIAN, Statistics
from ao_core.calibration.visit import Inputs, inputs_of, visit
from ao_core.config import Config
from ao_core.targets import Decision, decide


def decisions(model: nn.Module) -> list[Decision]:
    return [entry for entry in decide(model, Config(), None) if entry.config is not None]


def hessians(model: nn.Module, data: list[Tensor], fqn: str) -> list[Tensor | None]:
    groups = collect(model, data, decisions(model), lambda entry: (HESSIAN,))
    for group in groups:
        if fqn in [entry.fqn for entry in group.entries]:
            return [each["hessian"] if each.rows else None for each in group.statistics]
    raise AssertionError(fqn)


class Experts(nn.Module):
    """Three experts of 5 rows and 8 columns, and a router; `how` says which matmul the code uses."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.router = how, nn.Linear(8, 3, bias=False)
        self.weight = nn.Parameter(torch.randn(3, 5, 8))

    def route(self, x: Tensor) -> Tensor:
        return self.router(x).argmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        best = self.route(x)
        order = best.argsort(stable=True)
        counts = torch.bincount(best, minlength=3)
        rows, out = x[order], torch.zeros(len(x), 5, dtype=x.dtype)
        if self.how == "grouped_mm":
            ends = counts.cumsum(0).to(torch.int32)
            return torch._grouped_mm(rows, self.weight.transpose(1, 2), ends)
        if self.how == "bmm":
            padded = torch.zeros(3, int(counts.max()), 8, dtype=x.dtype)
            for number, each in enumerate(rows.split(counts.tolist())):
                padded[number, : len(each)] = each
            return torch.bmm(padded, self.weight.transpose(1, 2))
        if self.how == "einsum":  # all rows with each expert
            return torch.einsum("tk,enk->etn", x, self.weight)
        for number, each in enumerate(rows.split(counts.tolist())):
            if self.how == "linear":
                found = F.linear(each, self.weight[number])
            elif self.how == "tensor index":
                found = F.linear(each, self.weight[torch.tensor(number)])
            else:
                found = each @ self.weight[number].T
            out[order[best[order] == number]] = found
        return out


WAYS = ["grouped_mm", "bmm", "einsum", "linear", "tensor index", "matmul"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_expert_sees_its_own_rows(how: str, dtype: torch.dtype) -> None:
    model = Experts(how).to(dtype)
    data = [torch.randn(n, 8).to(dtype) for n in (20, 7)]
    found = hessians(model, data, "weight")
    assert len(found) == 3
    for number, hessian in enumerate(found):
        rows = [x if how == "einsum" else x[model.route(x) == number] for x in data]
        assert hessian is not None
        wide = torch.cat(rows).double()
        torch.testing.assert_close(hessian, wide.T @ wide, rtol=1e-5, atol=1e-4)


def test_experts_with_few_rows_borrow_from_all() -> None:
    model = Experts("linear")
    x = torch.randn(60, 8)
    x[:, 0] = -x[:, 0].abs()
    x[:3, 0] = 1.0
    with torch.no_grad():  # the first expert gets three rows, the second none, the last all others
        model.router.weight.zero_()
        model.router.weight[0, 0], model.router.weight[2, 0] = 1.0, -1.0
    counts = torch.bincount(model.route(x), minlength=3).tolist()
    assert counts == [3, 0, 57]
    seen: list[Inputs] = []

    def keep(entry: Decision, inputs: Inputs) -> None:
        seen.append(inputs)

    visit(model, [x], decisions(model), lambda entry: (HESSIAN,), keep)
    inputs = seen[-1]
    assert inputs.note == (
        "2 of 3 experts saw fewer rows than they have columns, 8: the statistics of the 60 rows of all "
        "experts stand for what is missing"
    )
    assert inputs.rows == 60
    wide, of = x.double(), model.route(x)
    for number, (count, each) in enumerate(zip(counts, inputs.statistics, strict=True)):
        own = wide[of == number].T @ wide[of == number]
        pooled = own + max(8 - count, 0) / 60 * (wide.T @ wide)
        torch.testing.assert_close(each["hessian"], pooled, rtol=1e-5, atol=1e-4)
        assert each.rows == max(count, 8)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(4, 6, 3),
        nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        nn.Conv2d(6, 6, 3, groups=6, padding="same"),
        nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular", bias=False),
        nn.Conv3d(2, 3, 2, groups=1, padding=(1, 0, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("batched", [True, False])
def test_convolutions_are_matmuls_with_unfolded_inputs(
    layer: nn.Module, dtype: torch.dtype, batched: bool
) -> None:
    layer = layer.to(dtype)
    dims = layer.weight.dim() - 2
    x = torch.randn(*([2] if batched else []), layer.in_channels, *(7, 6, 5)[:dims]).to(dtype)
    seen: dict[int, Tensor] = {}
    with torch.no_grad(), observing([("w", layer.weight)], lambda name, n, x: seen.update({n: x})):
        expected = layer(x)
    (entry,) = decisions(nn.Sequential(layer))
    weight = matrices(layer.weight.detach(), entry.owners[0])
    assert len(weight) == len(seen) == layer.groups
    matmuls = [seen[n].double() @ weight[n].double().T for n in range(layer.groups)]
    found = torch.cat(matmuls, 1)  # (positions, out)
    if layer.bias is not None:
        found = found + layer.bias.detach().double()
    expected = expected if batched else expected.unsqueeze(0)
    rows = expected.transpose(0, 1).flatten(1).T.double()
    close = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(found, rows, rtol=close, atol=close)
    assert torch.equal(unmatrices(weight, layer.weight.shape, entry.owners[0]), layer.weight)


def test_a_convolution_and_experts_are_visited_by_both_drivers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv1d(3, 8, 3, padding=1, groups=1)
            self.layers = nn.ModuleList(Experts(how) for how in ("linear", "grouped_mm"))
            for layer in self.layers:
                layer.weight = nn.Parameter(torch.randn(3, 8, 8))
                layer.forward = lambda x, layer=layer: torch.tanh(
                    sum(F.linear(x, layer.weight[n]) for n in range(3)) + layer.router(x).mean()
                )

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).transpose(1, 2).reshape(-1, 8)
            for layer in self.layers:
                x = layer(x)
            return x

    def rewrite(entry: Decision, inputs: Inputs) -> Tensor:
        weight = matrices(entry.tensor.detach(), entry.owners[0])
        new = [
            (one.double() * torch.sigmoid(each["hessian"].sum(0) / (1 + each["hessian"].trace())))
            for one, each in zip(weight, inputs.statistics, strict=True)
        ]
        return unmatrices(torch.stack(new), entry.tensor.shape, entry.owners[0]).float()

    model, data = Model(), [torch.randn(2, 3, 9), torch.randn(1, 3, 4)]
    found = [
        visit(model, data, decisions(model), lambda entry: (HESSIAN,), rewrite, driver=driver)
        for driver in ("blocks", "prefix")
    ]
    names = [
        "stem.weight",
        *(f"layers.{n}.{each}" for n in (0, 1) for each in ("weight", "router.weight")),
    ]
    assert list(found[0].values) == names
    for name in names:
        assert torch.equal(found[0].values[name], found[1].values[name]), name
    assert inputs_of(decisions(model)[0], ()).rows == 0


class Twice(nn.Module):
    """Queries see the same inputs twice, keys once; only the first and the last matmul are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.o = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) + self.q(x) + self.k(x))


@pytest.mark.parametrize("count", [1, 3])
def test_states_that_others_share_are_not_changed_in_place(count: int) -> None:
    data = [torch.randn(5, 8) for _ in range(count)]
    x = torch.cat(data).double()
    for name, factor in (("q.weight", 2), ("k.weight", 1)):
        (found,) = hessians(Twice(), data, name)
        assert found is not None
        torch.testing.assert_close(found, factor * (x.T @ x), rtol=1e-5, atol=1e-4)


def test_a_hessian_in_strips_is_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ao_core.calibration.statistics._STRIP", 7)
    x = torch.randn(40, 24)
    found = Statistics((HESSIAN,)).add(x[:10]).absorb(x[10:15]).absorb(x[15:]).finish()
    torch.testing.assert_close(found["hessian"], x.double().T @ x.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found["hessian"], found["hessian"].T, rtol=1e-5, atol=1e-4)
    assert found.rows == 40


def test_a_block_ends_where_the_inputs_of_a_weight_are_seen() -> None:
    """Of four layers in a block, one runs no more than is needed; values are those of the other driver."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.ends = 0

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.b(self.a(x).relu())
            self.ends += 1
            return out

    model, data = nn.Sequential(Block(), Block(), Block()), [torch.randn(4, 6) for _ in range(3)]

    def halve(entry: Decision, inputs: Inputs) -> Tensor:
        return entry.tensor.detach() * (0.5 + inputs.statistics[0]["hessian"].mean().float())

    runs = {}
    for driver in ("blocks", "prefix"):
        found = visit(model, data, decisions(model), lambda entry: (HESSIAN,), halve, driver=driver)
        runs[driver] = [block.ends for block in model], found.values
        for block in model:
            block.ends = 0
    for name, value in runs["prefix"][1].items():
        assert torch.equal(value, runs["blocks"][1][name]), name
    # one batch to find the order; each one for the outputs, which nobody needs of the last block
    assert runs["blocks"][0] == [4, 4, 1]
