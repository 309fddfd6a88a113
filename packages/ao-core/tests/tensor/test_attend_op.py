"""The operator of torch that traced code has in place of `attend`: schema, compiled and exported programs."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

from ao_core import Spec, quantize_tensor
from ao_core.errors import UnsupportedOp
from ao_core.ext import attend
from ao_core.ext.kernels import Leaves

INT8 = Spec("int8", (1, -1), layout="plain")
#: programs that were exported before hold calls of it: it must not change
SCHEMA = (
    "ao_core::attend(Tensor q, Tensor[] key, str key_names, str key_spec, SymInt[] key_shape, "
    "Tensor[] value, str value_names, str value_spec, SymInt[] value_shape, Tensor counts, Tensor? tail_key, "
    "Tensor? tail_value, Tensor? center, Tensor? start, Tensor? stop, Tensor? sinks, float scale, "
    "bool causal, SymInt window, float softcap) -> Tensor"
)


class Attention(nn.Module):
    """Over keys and values that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = (
            Leaves.of(quantize_tensor(torch.randn(1, 2, 40, 16), INT8)) for _ in range(2)
        )
        for i, tensor in enumerate((*self.key.leaves, *self.value.leaves)):
            self.register_buffer(f"part_{i}", tensor)

    def forward(self, q: Tensor, counts: Tensor) -> Tensor:
        parts = list(self.buffers())
        key = self.key.with_leaves(tuple(parts[:2]), self.key.shape)
        return attend(q, key, self.value.with_leaves(tuple(parts[2:]), self.value.shape), counts)


def arguments() -> tuple[Tensor, Tensor]:
    return torch.randn(1, 4, 3, 16), torch.tensor([40, 40])


def operator() -> torch._ops.OpOverload:
    from ao_core.tensor import attend_op

    return attend_op._OP


def test_schema() -> None:
    assert str(operator()._schema) == SCHEMA


def test_operator() -> None:
    """What torch asks of operators: nothing is written or shared, fakes fit, also with symbolic sizes."""
    model, (q, counts) = Attention(), arguments()
    key, value = (
        ([*each.leaves], " ".join(each.names), each.text, list(each.shape))
        for each in (model.key, model.value)
    )
    given = (q, *key, *value, counts, *[None] * 6, 0.25, True, 0, 0.0)
    results = torch.library.opcheck(operator(), given)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    model, given = Attention(), arguments()
    expected = model(*given)
    torch.compiler.reset()
    assert torch.equal(torch.compile(model, fullgraph=True)(*given), expected)


def test_exported_and_loaded() -> None:
    model, (q, counts) = Attention(), arguments()
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (q, counts)), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    assert torch.equal(loaded(q, counts), model(q, counts))
    out = loaded(q.clone().requires_grad_(), counts)
    with (
        pytest.warns(UserWarning, match="autograd kernel was not registered"),
        pytest.raises(UnsupportedOp, match="no gradient"),
    ):
        out.sum().backward()


def test_compiled_code_has_no_gradient() -> None:
    model, (q, counts) = Attention(), arguments()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.no_grad"):
        compiled(q.requires_grad_(), counts)
    with torch.no_grad():
        assert torch.equal(compiled(q, counts), model(q, counts))
