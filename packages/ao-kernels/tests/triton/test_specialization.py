"""What launches are compiled for: never where a bias or semaphores begin; how sums stay in int32."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import ao_kernels.triton
from ao_core import WHOLE, Call, Spec, quantize_tensor
from ao_core.ext import registry, to_layout
from ao_core.testing import LayoutSuite
from ao_core.testing.base import gaussian
from ao_kernels.triton.shared.known_answer import concrete
from ao_kernels.triton.weight_only import samples

SOURCES = Path(ao_kernels.triton.__file__).parent
ROW, UINT8 = (1, WHOLE), Spec("uint8", (1, WHOLE), zero_point="int")
#: what callers give, and what is cut from a pool, with the families that take it; zero points and sums are
#: parts of a weight elsewhere, which begin where their memory does
ANYWHERE = {
    "bias_ptr": {"bsr", "scaled_mm", "trellis", "w4a8", "weight_only"},
    "semaphore_ptr": {"bsr", "w4a8", "weight_only"},
    "offs_ptr": {"scaled_mm", "weight_only"},
    "x_scale_ptr": {"w4a8"},
    "x_zero_ptr": {"w4a8"},
    "zero_ptr": {"rows", "scaled_mm"},
    "sums_ptr": {"scaled_mm"},
    "center_ptr": {"attend"},
    "counts_ptr": {"attend"},
    "sinks_ptr": {"attend"},
    "start_ptr": {"attend"},
    "stop_ptr": {"attend"},
}


class Launched(NamedTuple):
    """A kernel that is launched, not only called by others, with the options of its `triton.jit`."""

    family: str
    label: str
    definition: ast.FunctionDef
    options: dict[str, list[str]]


def launched():
    """By the sources: `kernel.NAME[grid]` in a module of the family, and the definition of NAME."""
    for path in sorted(SOURCES.rglob("kernel*.py")):
        family = path.parent
        launches = "".join(
            each.read_text(encoding="utf-8")
            for each in family.glob("*.py")
            if not each.stem.startswith("kernel")
        )
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and f" {path.stem}.{node.name}[" in launches:
                (jit,) = node.decorator_list
                given = jit.keywords if isinstance(jit, ast.Call) else []
                options = {each.arg: ast.literal_eval(each.value) for each in given}
                yield Launched(family.name, f"{path}: {node.name}", node, options)


LAUNCHED = tuple(launched())


def test_every_launch_is_found():
    """A kernel without options too, which would else not be asked anything."""
    count = 0
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not path.stem.startswith("kernel"):
            count += len(re.findall(r"\bkernel\w*\.\w+\[", text))
    assert len(LAUNCHED) == count > 15
    assert {"quantize_rows", "matmul"} <= {kernel.definition.name for kernel in LAUNCHED}


@pytest.mark.parametrize("name", ANYWHERE)
def test_pointers_that_may_begin_anywhere(name):
    """Every kernel that takes one says so where it is defined (without Triton: by its source)."""
    families = set()
    for kernel in LAUNCHED:
        arguments = {argument.arg for argument in kernel.definition.args.args}
        if name in arguments and kernel.family in ANYWHERE[name]:
            assert name in kernel.options.get("do_not_specialize_on_alignment", ()), kernel.label
            families.add(kernel.family)
    assert families == ANYWHERE[name]


class TestRowSums(LayoutSuite):
    layout = "row_sums"
    specs = (Spec("int8", ROW, act=UINT8), Spec("int8", (WHOLE, WHOLE), act=UINT8))
    shapes = ((33, 70),)


def test_sums_of_rows():
    q = quantize_tensor(gaussian((33, 70)), Spec("int8", ROW, act=UINT8))
    w = to_layout(q, "row_sums")
    assert w.parts["qdata"].shape == (33, 80)
    assert torch.equal(w.parts["sums"], q.parts["qdata"].sum(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Spec("int8", ROW, act=Spec("int8", ROW)), "zero points"),
        (Spec("int4", ROW, act=UINT8), "holds int8"),
        (Spec("int8", (1, 64), act=UINT8), "one scale"),
    ],
)
def test_what_needs_no_sums(spec, words):
    layout = registry.layouts.get("row_sums")
    assert words in layout.refuses(spec, (64, 64), registry.dtypes.get(spec.dtype))


def test_known_answers_of_traced_calls_compare_no_symbol():
    """A number of tokens that is a symbol stays one: samples are of few and of many tokens."""
    env = ShapeEnv()
    m = env.create_symintnode(env.create_symbol(7, ConstantSource("m"), DimDynamic.DYNAMIC), hint=7)
    spec = Spec("int4", (1, 128), "bfloat16", layout="plane16")
    call = Call("linear", spec, (256, 512), (m, 512), torch.bfloat16, "cuda")
    found = concrete(call)
    assert [each.x_shape for each in found] == [(n, 512) for n in (1, 32, 64, 128)]
    assert len({samples.linear(each).facts for each in found}) == 4
    assert not env.replacements
    assert concrete(found[0]) == [found[0]]


@pytest.mark.parametrize(("act", "most"), [(Spec("int8", ROW), 1 << 17), (UINT8, 1 << 16)])
def test_sums_stay_in_int32(act, most):
    """Every product at its largest, and every zero point at its end."""
    kernel = registry.kernels.get("triton_int8_linear")

    def reason(k):
        return kernel.refuses(
            Call("linear", Spec("int8", ROW, act=act), (8, k), (4, k), torch.bfloat16, "cuda")
        )

    assert "int32" in reason(most)
    assert reason(most - 1) is None
    least = 128 * 128 * (most - 1) * (2 if act is UINT8 else 1)
    assert least < 2**31 <= 128 * 128 * most * (2 if act is UINT8 else 1)
