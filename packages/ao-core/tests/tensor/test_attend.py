"""`attend`: as good as torch's attention, in bounded memory, and refused where something does not fit.

What each option does is tested by the op's trials, in `conformance/test_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ao_core import WHOLE, Spec, quantize_tensor
from ao_core.errors import ConfigError, UnsupportedOp
from ao_core.ext import NO_SCALE, attend
from ao_core.ext.kernels import Attention, Leaves

INT8 = Spec("int8", (1, WHOLE), "float16")
NESTED = Spec("nf4", (1, 16), Spec("int8", (1, WHOLE)), layout="packed")
DENSE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def operands(
    dtype: torch.dtype = torch.float32, queries: int = 5, tokens: int = 300, dim: int = 32
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 6, queries, dim), (2, 2, tokens, dim), (2, 2, tokens, dim))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("dtype", DENSE)
@pytest.mark.parametrize("queries", [1, 300])
def test_exact_formats_are_as_exact_as_torch(dtype: torch.dtype, queries: int) -> None:
    q, k, v = operands(dtype, queries)
    spec = Spec(DENSE[dtype], (1, WHOLE), NO_SCALE)
    found = attend(q, quantize_tensor(k, spec), quantize_tensor(v, spec))
    seen = torch.ones(queries, 300, dtype=torch.bool).tril(300 - queries)
    exact, torchs = (
        F.scaled_dot_product_attention(*each, attn_mask=seen, enable_gqa=True)
        for each in ([x.double() for x in (q, k, v)], (q, k, v))
    )
    ours, theirs = ((x.double() - exact).norm() / exact.norm() for x in (found, torchs))
    assert ours <= 2 * theirs
    assert ours > 0
    assert (found.dtype, found.is_contiguous()) == (dtype, True)


class Largest(TorchDispatchMode):
    """The most elements that the result of an op has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and not func.is_view:
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("queries", [1, 40])
def test_no_temporary_is_as_large_as_the_cache(queries: int) -> None:
    tokens = 40_000
    k = quantize_tensor(torch.randn(1, 2, tokens, 32), INT8)
    q = torch.randn(1, 4, queries, 32)
    with Largest() as largest:
        attend(q, k, k)
    assert tokens < largest.numel < k.numel() / 2


def test_queries_that_see_nothing_get_zero() -> None:
    q, k, _ = operands()
    empty = torch.zeros(2, dtype=torch.int64)
    key = quantize_tensor(k, INT8)
    assert not attend(q, key, key, empty, causal=False).any()
    padded = attend(q, key, key, start=torch.tensor([299, 0]))
    assert not padded[0, :, :4].any()
    assert padded[0, :, 4].any()


def test_gradients_are_refused() -> None:
    q, k, _ = operands()
    key = quantize_tensor(k, INT8)
    out = attend(q.requires_grad_(), key, key)
    with pytest.raises(UnsupportedOp, match="no gradient"):
        out.sum().backward()


@pytest.mark.parametrize("spec", [INT8, NESTED], ids=str)
def test_compiled(spec: Spec) -> None:
    q, k, v = operands(queries=2)
    key, value = (Leaves.of(quantize_tensor(x, spec)) for x in (k, v))
    counts, sinks = torch.tensor([140, 140]), torch.randn(6)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    options: dict[str, Any] = {"sinks": sinks, "window": 30, "softcap": 2.0}
    expected = attend(q, key.tensor(), value.tensor(), counts, **options)
    assert torch.equal(compiled(q, key, value, counts, **options), expected)


def refused(**changed: Any) -> None:
    q, k, v = operands()
    given = {"q": q, "key": quantize_tensor(k, INT8), "value": quantize_tensor(v, INT8), **changed}
    attend(**given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.randn(2, 5, 3, 32)}, "5 heads, which the 2 heads of key do not divide"),
        ({"q": torch.randn(3, 6, 3, 32)}, "batch of 3, and key one of 2"),
        ({"q": torch.randn(2, 6, 3, 16)}, "heads of 16 elements, and key of 32"),
        ({"q": torch.randn(6, 3, 32)}, "of 3 dimensions"),
        ({"q": torch.ones(2, 6, 3, 32, dtype=torch.int64)}, "torch.int64"),
        ({"q": torch.randn(2, 6, 3, 32).bfloat16()}, "logical dtype torch.float32, and q is torch.bf"),
        ({"q": torch.randn(2, 6, 3, 32, device="meta")}, "key is on cpu, and q on meta"),
        ({"value": quantize_tensor(torch.randn(2, 2, 9, 32), INT8)}, "must agree in all but the last"),
        ({"key": torch.randn(2, 2, 300, 32)}, "use a QTensor"),
        (
            {"key": quantize_tensor(torch.randn(2, 2, 300, 32), Spec("int8", (1, -1), act=INT8))},
            "queries of attention are not quantized",
        ),
        ({"counts": torch.tensor([301, 301])}, "memory for 300 of those, and for 0 others"),
        ({"counts": torch.tensor([301, 300])}, "memory for 300 of those, and for 0 others"),
        ({"counts": torch.tensor([3.0, 3.0])}, "counts is torch.float32"),
        ({"start": torch.tensor([1])}, r"start is torch.int64 \(1,\)"),
        ({"stop": torch.tensor([1, 2]).int()}, r"stop is torch.int32 \(2,\)"),
        ({"sinks": torch.zeros(2)}, r"sinks is torch.float32 \(2,\)"),
        ({"center": torch.zeros(2, 2, 1, 31)}, "center is torch.float32"),
        ({"tail_key": torch.zeros(2, 2, 4, 32)}, "pass both, or None for both"),
        ({"window": 3, "causal": False}, "window=3 with causal=False"),
        ({"window": -1}, "window=-1"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"scale": float("nan")}, "scale=nan"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refused(**changed)


def test_modes_are_checked() -> None:
    assert Attention(0.5, window=3).window == 3
    with pytest.raises(ConfigError, match="causal"):
        Attention(0.5, causal="yes")  # type: ignore[arg-type]
