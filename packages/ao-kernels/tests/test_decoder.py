"""The kernel of `decoder` on the CPU: the suite, and plans, which are read once and end with their blocks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import repack
from ao_core.ext.kernels import (
    Attention,
    CachedBlock,
    CachedBlocks,
    Heads,
    KeysAndValues,
    NormBefore,
    OutputHead,
    Projection,
)
from ao_core.testing import KernelSuite
from ao_core.testing.base import gaussian

SPEC, CODES = (
    Spec("int4", (1, 32), "bfloat16", layout="packed"),
    Spec("int8", (1, WHOLE), "float16"),
)


class TestDecoder(KernelSuite):
    kernel = "cpu_tiles_decoder"


class TestDecoder8(KernelSuite):
    kernel = "cpu_tiles8_decoder"


def weight(n: int, k: int) -> Projection:
    stored: QTensor = repack(quantize_tensor(gaussian((n, k)) / k**0.5, SPEC))
    return Projection(stored)


def blocks(*, head: bool = True, **changes: Any) -> CachedBlocks:
    """One block of 4 heads of 16, with 2 of keys, over an empty cache."""
    norm = NormBefore(torch.ones(64), 1e-5, "direct")
    key, value = (quantize_tensor(gaussian((1, 2, 256, 16)), CODES) for _ in range(2))
    counts = torch.zeros(2, dtype=torch.int64)
    tails = torch.zeros(2, 1, 2, 140, 16)
    block = CachedBlock(
        norm, weight(128, 64), Heads(4, 2, 16), KeysAndValues(key, value, counts, *tails, None), None,
        Attention(0.25, True, 0, 0.0), weight(64, 64), norm, weight(192, 64), weight(64, 96), "silu",
    )._replace(**changes)  # fmt: skip
    return CachedBlocks((block,), OutputHead(norm, weight(100, 64)) if head else None)


def call(made: CachedBlocks) -> tuple[Tensor, Tensor]:
    return made(gaussian((1, 1, 64)), *gaussian((2, 1, 1, 16)), None, None)


def plan_of(made: CachedBlocks) -> Tensor:
    (bound,) = made.bound.values()
    return bound.plan  # type: ignore[no-any-return]


def op(plan: Tensor, count: int = 1, columns: int = 100, **changes: Any) -> Any:
    x, tables = gaussian((1, 1, 64)), gaussian((2, 1, 1, 16))
    given = {"x": x, "cosine": tables[0], "sine": tables[1], "start": None, "stop": None} | changes
    return torch.ops.ao_kernels.decoder.default(*given.values(), plan, count, columns)


def test_a_plan_is_read_once_and_ends_with_its_blocks() -> None:
    made = blocks()
    first = call(made)
    plan = plan_of(made)
    made.blocks[0].cache.counts.zero_()
    again = call(made)
    assert all(map(torch.equal, first, again))
    assert plan_of(made) is plan
    assert [x.shape for x in again] == [(1, 1, 1, 64), (1, 1, 100)]
    del made
    gc.collect()
    with pytest.raises(RuntimeError, match="there is no such plan, or it was forgotten"):
        op(plan)


def test_weights_that_are_written_to_are_seen() -> None:
    made = blocks()
    first = call(made)
    head: Any = made.head
    head.projection.weight.scale.mul_(2)
    made.blocks[0].cache.counts.zero_()
    assert torch.equal(call(made).logits, 2 * first[1])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"count": 2}, "blocks=2: the plan has 1"),
        ({"columns": 99}, "columns=99: the plan has 100"),
        ({"x": torch.zeros(1, 1, 63)}, "x: has shape (1, 1, 63); must be (1, 1, 64)"),
        ({"x": torch.zeros(2, 1, 64)}, "x: has shape (2, 1, 64); must be (1, 1, 64)"),
        ({"x": torch.zeros(1, 1, 64).bfloat16()}, "x: has dtype BFloat16"),
        ({"start": torch.zeros(2, dtype=torch.int64)}, "start: has shape (2); must be (1)"),
        ({"plan": torch.zeros(8, dtype=torch.int64)}, "plan: has shape (8); must be (64)"),
        ({"plan": torch.zeros(64)}, "plan: has dtype Float"),
        (
            {"cosine": torch.zeros(1, 1, 32), "sine": torch.zeros(1, 1, 32)},
            "block 0: cosine: has 32 elements for a token; heads have 16",
        ),
    ],
)
def test_calls_that_do_not_fit_to_a_plan(changes: dict[str, Any], problem: str) -> None:
    made = blocks()
    call(made)
    changes = {"plan": plan_of(made), **changes}
    with pytest.raises(RuntimeError) as error:
        op(**changes)
    assert problem in str(error.value)


def test_counts_that_do_not_fit() -> None:
    made = blocks(head=False)
    assert call(made)[1].shape == (1, 1, 0)
    for counts in ([5, 6], [-1, 0], [140, 0], [300, 257]):
        made.blocks[0].cache.counts.copy_(torch.tensor(counts))
        with pytest.raises(ValueError, match=r"block 0: counts=\["):
            call(made)


def test_memory_that_would_be_copied_is_refused() -> None:
    spread = NormBefore(torch.ones(128)[::2], 1e-5, "direct")
    with pytest.raises(RuntimeError, match="block 0: tensors: must be contiguous"):
        call(blocks(before=spread))


def test_the_fake_op_has_its_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    made = blocks()
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = made(torch.empty(1, 1, 64), *torch.empty(2, 1, 1, 16), None, None)
    assert [x.shape for x in found] == [(1, 1, 1, 64), (1, 1, 100)]
