"""What launches are compiled for: never where a bias or semaphores begin; how sums stay in int32."""

from __future__ import annotations

from pathlib import Path

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

KERNELS = sorted(Path(ao_kernels.triton.__file__).parent.rglob("kernel*.py"))
ROW, UINT8 = (1, WHOLE), Spec("uint8", (1, WHOLE), zero_point="int")


@pytest.mark.parametrize(
    "name", ["semaphore_ptr", "bias_ptr", "offs_ptr", "counts_ptr", "sinks_ptr"]
)
def test_pointers_that_may_begin_anywhere(name):
    """Every kernel that takes one says so where it is defined (without Triton: by its source)."""
    found = 0
    for path in KERNELS:
        for definition in path.read_text(encoding="utf-8").split("@triton.jit")[1:]:
            head, _, body = definition.partition("\ndef ")
            parameters = body.partition("):")[0]
            # only kernels that are launched have options; functions that they call have none
            if f"    {name}," in parameters and head.strip():
                assert f'"{name}"' in head.partition("do_not_specialize_on_alignment")[2], path
                found += 1
    assert found


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
