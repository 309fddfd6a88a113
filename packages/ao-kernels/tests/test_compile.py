"""Tracing: custom ops that PyTorch's own check accepts, torch.compile, export and AOTInductor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import repack
from ao_core.testing.programs import aot_inductor
from ao_kernels.cpu.linear import matmul_arguments

ROW = (1, WHOLE)
SPECS = {
    "int4": Spec("int4", (1, 32), "bfloat16", layout="packed"),
    "uint4": Spec("uint4", (1, 64), "bfloat16", "int", "packed"),
    "nf4-double": Spec("nf4", (1, 16), Spec("f8e4m3", (WHOLE, WHOLE)), layout="packed"),
    "q4_k": Spec(
        "uint4", (1, 32), Spec("uint6", (1, 8), "float16", layout="packed"), "offset", "packed"
    ),
    "mxfp4": Spec("f4e2m1", (1, 32), "e8m0", layout="packed"),
    "int8": Spec("int8", ROW),
    "f8e4m3": Spec("f8e4m3", ROW),
    "int8-dynamic": Spec("int8", ROW, act=Spec("uint8", ROW, zero_point="int")),
    "int4-dynamic": Spec("int4", (1, 32), "bfloat16", layout="packed", act=Spec("int8", ROW)),
}


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def weight(name: str, *shape: int) -> QTensor:
    w = repack(quantize_tensor(randn(*shape), SPECS[name]))
    assert w.spec.layout.startswith("cpu_tiles")
    return w


def linear(name: str, k: int, n: int) -> nn.Linear:
    layer = nn.Linear(k, n)
    layer.weight = nn.Parameter(weight(name, n, k), requires_grad=False)
    return layer.requires_grad_(False)


class Model(nn.Module):
    """An embedding, and two layers of each format, all in tiles."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 64)
        self.embed.weight = nn.Parameter(weight("int4", 11, 64), requires_grad=False)
        self.a = nn.ModuleList(linear(name, 64, 48) for name in names)
        self.b = nn.ModuleList(linear(name, 48, 33) for name in names)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return torch.cat([b(torch.relu(a(x))) for a, b in zip(self.a, self.b, strict=True)], -1)


IDS = torch.tensor([[1, 2, 3, 1, 0], [10, 9, 8, 7, 6]])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- ops ---------------------------------------------------------------------------------------------


def opcheck(op: Any, args: tuple[Any, ...]) -> None:
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests.append("test_aot_dispatch_dynamic")
    if any(isinstance(a, Tensor) and a.dtype.itemsize == 1 and a.is_floating_point() for a in args):
        tests.remove("test_schema")  # it compares arguments in a way that torch has not for float8
    results = torch.library.opcheck(op, args, test_utils=tests)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in SPECS),
        ("uint4", torch.bfloat16),
        ("int8-dynamic", torch.float16),
    ],
    ids=str,
)
def test_linear_op(name: str, dtype: torch.dtype) -> None:
    tensors, numbers = matmul_arguments(weight(name, 33, 80))
    op = torch.ops.ao_kernels.linear.default
    for shape, bias in (((3, 80), randn(33).to(dtype)), ((2, 1, 80), None)):
        opcheck(op, (randn(*shape).to(dtype), *tensors, bias, *numbers))


@pytest.mark.parametrize("name", SPECS)
def test_grouped_linear_op(name: str) -> None:
    tensors, numbers = matmul_arguments(weight(name, 3, 33, 80))
    op = torch.ops.ao_kernels.grouped_linear.default
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    for x, offs in ((randn(7, 80), ends), (randn(3, 4, 80), None)):
        opcheck(op, (x, *tensors, offs, *numbers))


@pytest.mark.parametrize("bits", range(1, 9))
def test_tile_ops(bits: int) -> None:
    packed = torch.randint(0, 256, (2, 20, -(-48 * bits // 8)), dtype=torch.uint8)
    where = (20, 48, bits, 32, 1)
    ops = torch.ops.ao_kernels
    for op, tensor in (
        (ops.pack_tiles.default, packed),
        (ops.unpack_tiles.default, ops.pack_tiles(packed, *where)),
    ):
        opcheck(op, (tensor, *where))


# -- torch.compile -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_one_graph_with_one_call(name: str) -> None:
    layer, found = linear(name, 64, 48), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        found.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
    x = randn(3, 64)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    assert found.count(torch.ops.ao_kernels.linear.default) == 1
    others = {str(target) for target in found} - {"ao_kernels.linear.default"}
    # the table is kept as the bits of its floats: a view, nothing is computed
    views = {"aten.lift_fresh_copy.default", "aten.detach.default", "aten.view.dtype"}
    assert others <= views, others


def test_recompiles_neither_for_other_weights_nor_for_known_sizes() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(F.linear, fullgraph=True, backend=counter, dynamic=True)
    weights = [weight("int4", 48, 64), repack(quantize_tensor(-randn(48, 64), SPECS["int4"]))]
    with torch.no_grad():
        for m in (7, 5, 17, 64, 200):  # first one that no part has as a size
            for w in weights:
                x = randn(m, 64)
                assert torch.equal(compiled(x, w, None), F.linear(x, w))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("cpp", [False, True], ids=["python-wrapper", "cpp-wrapper"])
def test_inductor(cpp: bool) -> None:
    model = Model(*SPECS).eval()
    with torch._inductor.config.patch(cpp_wrapper=cpp), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(IDS), model(IDS), rtol=1e-5, atol=1e-6)
        again = IDS.flip(0)
        torch.testing.assert_close(compiled(again), model(again), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_inductor_with_gradients_of_the_input() -> None:
    layer = linear("int4", 64, 48)
    compiled = torch.compile(layer, fullgraph=True)
    x, y = randn(3, 64).requires_grad_(), randn(3, 64).requires_grad_()
    compiled(x).square().sum().backward()
    layer(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


def test_experts_compile() -> None:
    w = weight("int4", 3, 33, 80)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)

    def matmul(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, w.transpose(-2, -1), offs)

    compiled: Any = torch.compile(matmul, fullgraph=True, backend="aot_eager")
    x = randn(5, 80).bfloat16()
    with torch.no_grad():
        assert torch.equal(compiled(x, w, offs), matmul(x, w, offs))


# -- export ------------------------------------------------------------------------------------------


def test_exports_saves_and_loads(tmp_path: Path) -> None:
    model = Model(*SPECS).eval()
    program = torch.export.export(model, (IDS,))
    inner = program.run_decompositions().graph.nodes
    assert [str(node.target) for node in inner].count("ao_kernels.linear.default") == 2 * len(SPECS)
    torch.testing.assert_close(program.module()(IDS), model(IDS))
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2")
    torch.testing.assert_close(again.module()(IDS), model(IDS))


def test_exports_with_any_number_of_rows() -> None:
    layer = linear("int4", 64, 48)
    rows = torch.export.Dim("rows", min=1, max=4096)
    program = torch.export.export(layer, (randn(5, 64),), dynamic_shapes=({0: rows},))
    for m in (1, 2, 33, 100):
        x = randn(m, 64)
        assert torch.equal(program.module()(x), layer(x))


@pytest.mark.slow
def test_aot_inductor_package(tmp_path: Path) -> None:
    model = Model("int4", "nf4-double", "int8-dynamic").eval()
    with torch.no_grad():
        loaded = aot_inductor(model, (IDS,), tmp_path)
        torch.testing.assert_close(loaded(IDS), model(IDS), rtol=1e-4, atol=1e-5)
