"""`hadamard`: the transform by the kernel that is selected, with gradients, traced and refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ao_core.dispatch import candidates, kernels
from ao_core.errors import ConfigError
from ao_core.records import Call
from ao_core.tensor.rotation import hadamard, hadamard_spec
from ao_core.testing.base import gaussian
from ao_core.testing.kernel_rotation import transformed


@pytest.mark.parametrize("band", ["reference", "compiled", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_under_every_pin(band: str, dtype: torch.dtype):
    x = gaussian((3, 2, 96)).to(dtype)
    with kernels(band):
        for inverse in (False, True):
            y = hadamard(x, 48, inverse=inverse)
            assert (y.shape, y.dtype) == (x.shape, dtype)
            expected = transformed(x, 48, inverse)
            bound = max(4 * torch.finfo(dtype).eps, 1e-13)
            assert (y.double() - expected).norm() <= bound * expected.norm()


def test_the_call_tells_kernels_the_block():
    call = Call("hadamard", hadamard_spec(48), (3, 96), (3, 96), torch.float64, "cpu")
    assert call.spec.block == (1, 48)
    found = {each.kernel.name: each.refusal for each in candidates(call)}
    assert found["reference_hadamard"] is None


@pytest.mark.parametrize("inverse", [False, True])
def test_the_gradient_is_the_transform_the_other_way(inverse: bool):
    x = gaussian((5, 24)).requires_grad_()
    grad = gaussian((5, 24), seed=1)
    (found,) = torch.autograd.grad(hadamard(x, 24, inverse=inverse), x, grad)
    expected = transformed(grad, 24, not inverse)
    assert (found.double() - expected).norm() <= 1e-6 * expected.norm()
    wide = gaussian((2, 12)).double().requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda v: hadamard(v, 12, inverse=inverse).square(), (wide,)
    )


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return hadamard(self.layer(hadamard(x, 48)).relu(), 12, inverse=True)


@pytest.mark.slow
def test_compiled_and_exported():
    torch._dynamo.reset()
    module, x = Rotated(), gaussian((4, 48))
    compiled = torch.compile(module, fullgraph=True)
    expected = module(x)
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=1e-5)
    grads = []
    for each in (compiled, module):
        module.zero_grad()
        each(x).square().sum().backward()
        grads.append(module.layer.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
        for rows in (4, 7):
            x = gaussian((rows, 48))
            torch.testing.assert_close(program.module()(x), module(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "block", "message"),
    [
        (torch.ones(2, 8, dtype=torch.int32), 8, "torch.int32"),
        (torch.tensor(1.0), 1, "0-dimensional"),
        (torch.ones(2, 172), 172, "block=172 of 172 elements: .* use 4"),
        (torch.ones(2, 24), 16, "block=16 of 24 elements: .* use 24"),
        (torch.ones(2, 24), 0, "block=0 of 24"),
        (torch.ones(2, 24), -12, "block=-12 of 24"),
    ],
)
def test_errors_say_what_would_work(x: Tensor, block: int, message: str):
    with pytest.raises(ConfigError, match=message):
        hadamard(x, block)
