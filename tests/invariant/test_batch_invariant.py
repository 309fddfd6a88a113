"""The batch-invariant mode: the bits of a row are those that it has alone, whatever is beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import batch_invariant, is_batch_invariant, quantize_
from ao_core.testing.base import gaussian
from ao_quant.kv_cache import append_, attend_to, new_kv

ROWS = (2, 4, 5, 16, 64)
#: one recipe of each kind of matmul: limbs, tables in limbs, bytes, float8 codes, two scales, zero points
RECIPES = (
    "int8_weight_only",
    "int4_weight_only",
    "int4_weight_only/g32-asymmetric",
    "nf4_weight_only",
    "float8_weight_only",
    "int8_dynamic_activation_int8_weight",
    "int8_dynamic_activation_int4_weight",
    "float8_dynamic_activation_float8_weight",
    "mx_weight_only",
    "gguf_weight_only/q5_k",
    "codebook_weight_only",
    "nvfp4_weight_only",
    "semi_sparse_weight",
    "int4_weight_only_semi_sparse",
)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def layer_of(recipe: str | None, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(256, 208)).to(dtype)
    layer[0].weight.copy_(gaussian((208, 256), seed=1).to(dtype))
    if recipe is not None:
        quantize_(layer, recipe)
    return layer


def rows_alone(fn: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([fn(row) for row in x.split(1)])


def same(out: Tensor, other: Tensor) -> bool:
    return torch.equal(out.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_linear(recipe: str | None, dtype: torch.dtype) -> None:
    layer, x = layer_of(recipe, dtype), gaussian((64, 256), seed=2).to(dtype)
    x[3, 7] = 300  # takes more limbs than its neighbours
    x[5] = 0
    x[6, 1] = torch.inf  # has none
    with batch_invariant():
        alone = rows_alone(layer, x)
        for rows in ROWS:
            assert same(layer(x[:rows]), alone[:rows]), rows
        assert same(layer(x[:12].reshape(3, 4, 256)).flatten(0, 1), alone[:12])
    expected = layer(x)
    finite = expected.isfinite()
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-4
    assert (alone - expected)[finite].norm() <= bound * expected[finite].norm()


def test_one_row_is_computed_as_always() -> None:
    layer, x = layer_of("int8_weight_only", torch.bfloat16), gaussian((1, 256), seed=3).bfloat16()
    expected = layer(x)
    with batch_invariant():
        assert same(layer(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["kv8", "k8v4", "kv4", "kv_fp8"])
def test_attention(recipe: str, dtype: torch.dtype) -> None:
    heads, group, size, tokens = 2, 3, 64, 700
    keys, values = (gaussian((2, heads, tokens, size), seed=s).to(dtype) for s in (4, 5))
    q = gaussian((2, heads * group, 64, size), seed=6).to(dtype)
    whole = new_kv(recipe, 2, heads, size, tokens, dtype=dtype)
    append_(whole, keys, values)
    for rows in ROWS:
        with batch_invariant():
            many = attend_to(whole, q[:, :, -rows:])
        for batch, place in ((0, 0), (1, rows - 1), (0, rows // 2)):
            # the same cache, up to the token of one query of one text
            kv = new_kv(recipe, 1, heads, size, tokens, dtype=dtype)
            append_(kv, keys[batch : batch + 1], values[batch : batch + 1])
            kv.counts[0] -= rows - 1 - place
            token = q.shape[2] - rows + place
            one = attend_to(kv, q[batch : batch + 1, :, token : token + 1])
            assert same(one[0, :, 0], many[batch, :, place]), (rows, batch, place)


def test_the_mode_ends_and_nests() -> None:
    assert not is_batch_invariant()
    with batch_invariant():
        with batch_invariant():
            assert is_batch_invariant()
        assert is_batch_invariant()
        with pytest.raises(ZeroDivisionError), batch_invariant():
            raise ZeroDivisionError
        assert is_batch_invariant()
    assert not is_batch_invariant()
    assert torch.ops.ao_kernels.want_batch_invariant(0) == 0


def test_dense_weights_keep_their_gradients() -> None:
    with torch.inference_mode(False):
        layer, x = nn.Linear(32, 8), torch.randn(5, 32)
        layer(x).sum().backward()
        expected = layer.weight.grad
        layer.weight.grad = None
        with batch_invariant():
            F.linear(x, layer.weight, layer.bias).sum().backward()
        torch.testing.assert_close(layer.weight.grad, expected)


def test_the_environment_sets_it() -> None:
    code = (
        "import ao_core, torch; from ao_core.ext import registry; registry.freeze();"
        "from ao_kernels.cpu.library import load; load();"
        "assert ao_core.is_batch_invariant() and torch.ops.ao_kernels.want_batch_invariant(0) == 1"
    )
    environment = {**os.environ, "AO_BATCH_INVARIANT": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
