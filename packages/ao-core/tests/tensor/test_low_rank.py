"""The step "low_rank": part of a weight in high precision, in one parameter with the codes of the rest."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import QTensor, Spec, explain, load_model, quantize_tensor, save_model
from ao_core.errors import ConfigError, QuantizationError, UnsupportedOp
from ao_core.steps import PERMUTE, SCALE, Step, hadamard_step, low_rank_step
from ao_core.testing.base import gaussian
from ao_core.testing.input_steps import step_values

N, K, R = 24, 64, 4
INT4 = Spec("int4", (1, 32), "bfloat16", layout="packed")
W4A8 = replace(INT4, act=Spec("int8", (1, -1)))
STEPS = [
    (low_rank_step(R),),
    (SCALE, hadamard_step(16), low_rank_step(R)),
    (low_rank_step(R), PERMUTE, hadamard_step(16)),
]


def weight(
    steps: tuple[Step, ...] = STEPS[0], spec: Spec = INT4, lead: tuple[int, ...] = ()
) -> QTensor:
    spec, shape = replace(spec, input=steps), (*lead, N, K)
    return quantize_tensor(gaussian(shape), spec, **step_values(spec, shape))


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_values(steps: tuple[Step, ...], dtype: torch.dtype) -> None:
    q, x = weight(steps).to(dtype), gaussian((2, 5, K), seed=3).to(dtype)
    dense = q.dequantize(torch.float32)
    assert isinstance(q, QTensor)
    assert float((dense - gaussian((N, K))).norm() / gaussian((N, K)).norm()) < 0.2
    expected, bias = x.float() @ dense.t(), gaussian((N,), seed=4).to(dtype)
    bound = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 0.3}
    torch.testing.assert_close(F.linear(x, q).float(), expected, **bound)
    torch.testing.assert_close(F.linear(x, q, bias).float(), expected + bias.float(), **bound)
    torch.testing.assert_close((x @ q.T).float(), expected, **bound)
    x.requires_grad_()
    F.linear(x, q).float().sum().backward()
    torch.testing.assert_close(
        x.grad.float(), torch.ones_like(expected) @ dense, rtol=0.05, atol=0.3
    )


def test_activations_are_not_quantized_for_it() -> None:
    """With the rest at 0, products are those of B A in the precision of activations."""
    spec = replace(W4A8, input=STEPS[0])
    b, a = (part.bfloat16().float() for part in step_values(spec, (N, K))["low_rank"])
    q = quantize_tensor(b @ a, spec, low_rank=(b, a))
    x = gaussian((7, K), seed=5)
    torch.testing.assert_close(F.linear(x, q), x @ (b @ a).t(), rtol=1e-4, atol=1e-3)
    assert float(q.qdata.float().abs().sum()) == 0


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_experts(steps: tuple[Step, ...]) -> None:
    """With rows sorted by expert, of which the last belong to none, and with rows of each."""
    q = weight(steps, lead=(3,)).to(torch.bfloat16)
    dense, x = q.dequantize(torch.float32), gaussian((10, K), seed=3).bfloat16()
    offs = torch.tensor([3, 3, 8], dtype=torch.int32)
    out = torch._grouped_mm(x, q.transpose(-2, -1), offs=offs).float()
    expected = torch.zeros(10, N)
    expected[:3], expected[3:8] = x[:3].float() @ dense[0].t(), x[3:8].float() @ dense[2].t()
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=0.3)
    each = gaussian((3, 5, K), seed=4).bfloat16()
    torch.testing.assert_close(
        torch.bmm(each, q.transpose(-2, -1)).float(),
        each.float() @ dense.mT,
        rtol=3e-2,
        atol=0.3,
    )
    one = q[1]
    assert isinstance(one, QTensor)
    assert torch.equal(one.dequantize(torch.float32), dense[1])


def test_pieces_and_joins() -> None:
    q = weight()
    dense = q.dequantize()
    for piece, wanted in (
        (q[8:20], dense[8:20]),
        (q[:, 32:], dense[:, 32:]),
        (torch.cat([q[:8], q[8:]]), dense),
        (torch.cat([q[:, :32], q[:, 32:]], 1), dense),
        (torch.stack([q, q])[1], dense),
        (q.index_select(0, torch.tensor([3, 1])), dense[[3, 1]]),
        (F.embedding(torch.tensor([2, 5]), q), dense[[2, 5]]),
    ):
        values = piece.dequantize() if isinstance(piece, QTensor) else piece
        torch.testing.assert_close(values, wanted)
    other = quantize_tensor(gaussian((N, K)), q.spec, **step_values(q.spec, (N, K), seed=99))
    with pytest.raises(UnsupportedOp, match="do not share one 'low_rank_a'"):
        torch.cat([q, other])
    with pytest.raises(UnsupportedOp, match="input steps are along the columns"):
        q.unbind()
    written = q.clone().copy_(gaussian((N, K), seed=8))
    again = quantize_tensor(gaussian((N, K), seed=8), q.spec, low_rank=(q.low_rank_b, q.low_rank_a))
    assert torch.equal(written.dequantize(), again.dequantize())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_compiled_saved_and_loaded(tmp_path) -> None:
    model, x = Net().eval(), gaussian((5, K), seed=3)
    model.layer.weight = nn.Parameter(weight(STEPS[1], W4A8), requires_grad=False)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(
            torch.compile(model, fullgraph=True)(x), expected, rtol=1e-4, atol=1e-4
        )
        save_model(model, tmp_path / "model.safetensors")
        fresh = Net().eval()
        load_model(fresh, tmp_path / "model.safetensors")
        assert torch.equal(fresh(x), expected)
        assert torch.equal(copy.deepcopy(model)(x), expected)
    found = fresh.layer.weight
    assert found.low_rank_b.shape == (N, R)
    assert found.stored_bytes == weight(SCALE_ONLY, W4A8).stored_bytes + 2 * R * (N + K)
    assert "low_rank(4)" in str(explain(fresh, x))


SCALE_ONLY = STEPS[1][:2]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (None, QuantizationError, "needs it"),
        ((gaussian((N, R + 1)), gaussian((R, K))), ConfigError, r"low_rank_b=.*use \(24, 4\)"),
        ((gaussian((N, R)), gaussian((R, K)) / 0), ConfigError, "low_rank_a must be finite"),
    ],
)
def test_what_is_no_part_of_low_rank(given: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        quantize_tensor(gaussian((N, K)), replace(INT4, input=STEPS[0]), low_rank=given)
    with pytest.raises(ConfigError, match="positive number"):
        low_rank_step(0)
