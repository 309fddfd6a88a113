"""The kernels of `attend` on the CPU, against the softmax over all tokens in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ao_core import WHOLE, QTensor, Spec, quantize_tensor
from ao_core.ext import ConfigError, attend, hadamard_step, registry
from ao_core.ext.kernels import AttendCall, Attention, WriteTailCall, attend_call, select
from ao_core.testing import KernelSuite
from ao_core.testing.base import gaussian
from ao_core.testing.kernel_attend import attended

TOKEN = Spec("int8", (1, WHOLE), "float16")
CHANNEL = Spec("uint4", (128, 1), "float16", "float", "packed", input=(hadamard_step(8),))
#: the formats of the recipes of KV caches, and what meets the queries in other ways
SPECS = (
    (TOKEN, Spec("uint4", (1, 64), "float16", "float", "packed", input=(hadamard_step(8),))),
    (CHANNEL, Spec("uint4", (1, WHOLE), "float16", "float", "packed", input=(hadamard_step(8),))),
    (Spec("f8e4m3", (1, WHOLE), "float16"), Spec("f8e4m3", (1, WHOLE), "float16")),
    (Spec("int4", (1, WHOLE), "bfloat16", layout="packed"), Spec("uint8", (1, WHOLE), "float32", "float")),
    (Spec("int8", (256, 1), "float32"), Spec("int6", (1, 64), "e8m0", layout="packed")),
)  # fmt: skip


class Recipes(KernelSuite):
    specs: Sequence[Any] = SPECS
    shapes = ((2, 2, 300, 64), (1, 3, 256, 136))


class TestPlain(KernelSuite):
    kernel = "cpu_attend_plain"


class TestPacked(KernelSuite):
    kernel = "cpu_attend_packed"


class TestPlainRecipes(Recipes):
    kernel = "cpu_attend_plain"


class TestPackedRecipes(Recipes):
    kernel = "cpu_attend_packed"


class TestTail(KernelSuite):
    kernel = "cpu_write_tail"


class TestEncodePlain(KernelSuite):
    kernel = "cpu_encode_tokens_plain"


class TestEncodePacked(KernelSuite):
    kernel = "cpu_encode_tokens_packed"


def operands(
    spec: Spec = TOKEN, tokens: int = 260, size: int = 64, dtype: torch.dtype = torch.bfloat16
) -> tuple[QTensor, QTensor]:
    """Keys and values of two rows and two heads."""
    dense = gaussian((2, 2, 2, tokens, size)).to(dtype)
    return quantize_tensor(dense[0], spec), quantize_tensor(dense[1], spec)


def called(q: Tensor, key: QTensor, value: QTensor, counts: list[int]) -> AttendCall:
    """The call of the op."""
    nothing = (None, None, None, None, None, None)
    return attend_call(q, key, value, torch.tensor(counts), *nothing, Attention(0.125))


@pytest.mark.parametrize("pair", SPECS, ids=str)
def test_recipes_are_served(pair: tuple[Spec, Spec]) -> None:
    key, value = operands(pair[0])[0], operands(pair[1], size=72)[1]
    call = called(gaussian((2, 4, 1, 64)).bfloat16(), key, value, [260, 260])
    assert select(call).name == f"cpu_attend_{pair[0].layout}"
    assert "2 heads of queries" in select(call).describe(call)


def test_what_is_refused() -> None:
    record = registry.kernels.get("cpu_attend_plain")
    for spec, dtype, words in (
        (TOKEN, torch.float64, "not torch.float64"),
        (Spec("int8", (1, 16), "float32", "offset"), torch.bfloat16, "offsets"),
        (
            Spec("int8", (1, WHOLE), Spec("f8e4m3", (WHOLE, WHOLE))),
            torch.bfloat16,
            "scales that are numbers",
        ),
    ):
        key, value = operands(spec, dtype=dtype)
        q = gaussian((2, 4, 1, 64)).to(dtype)
        assert words in str(record.refuses(called(q, key, value, [260, 260])))
    assert registry.kernels.get("cpu_write_tail").refuses(WriteTailCall(torch.float64, "cpu"))


@pytest.mark.parametrize("counts", [[261, 261], [260, -1], [3, 4], [270, 260]], ids=str)
def test_counts_that_there_is_no_memory_for(counts: list[int]) -> None:
    key, value = operands()
    tail = gaussian((2, 2, 8, 64)).bfloat16()
    with pytest.raises(ConfigError, match=rf"counts=\[{counts[0]}, {counts[1]}\]"):
        attend(tail[:, :, :1], key, value, torch.tensor(counts), tail_key=tail, tail_value=tail)


def test_tails_that_do_not_fit() -> None:
    op = torch.ops.ao_kernels.write_tail
    tail, new, counts = (
        torch.zeros(1, 2, 8, 4),
        torch.ones(1, 2, 3, 4),
        torch.zeros(2, dtype=torch.int64),
    )
    for changed, words in (
        ({"tail_key": tail.double()}, "tail_key: has dtype"),
        ({"tail_key": tail[:, :1]}, "tail_key: has shape"),
        ({"tail_value": tail.transpose(1, 2).contiguous().transpose(1, 2)}, "tail_value: must be contiguous"),
        ({"value": new[:, :, :2]}, "must have 3 and 8"),
        ({"coded": 4}, "no counts of a cache"),
        ({"counts": torch.tensor([6, 0])}, "no counts of a cache"),
        ({"counts": counts.int()}, "counts: has dtype"),
    ):  # fmt: skip
        given: dict[str, Any] = {
            "counts": counts, "tail_key": tail, "tail_value": tail, "key": new, "value": new,
            "coded": 0, **changed,
        }  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            op(**given)
    assert not tail.any()
    assert not counts.any()


@pytest.mark.parametrize("spec", [TOKEN, Spec("f8e4m3", (1, WHOLE), "float16")], ids=str)
def test_what_is_no_number_stays_in_its_row(spec: Spec) -> None:
    key, value = operands(spec)
    q = gaussian((2, 4, 3, 64)).bfloat16()
    expected = attend(q, key, value)
    q[1, 2, 1, 5] = torch.nan
    found = attend(q, key, value)
    bad = found.isnan().all(-1)
    assert bad.nonzero().tolist() == [[1, 2, 1]]
    assert torch.equal(found[~bad], expected[~bad])


def test_queries_with_outliers() -> None:
    """One element is 200 times as large as the others, as heads of some models have them."""
    q = gaussian((2, 4, 2, 64))
    q[..., 3] *= 200
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        args: list[Any] = [q.to(dtype), *operands(dtype=dtype), torch.tensor([260, 260])]
        args += [None] * 6 + [Attention(0.02)]
        found = registry.kernels.get("cpu_attend_plain").fn(*args).double()
        expected = attended(*args)
        assert (found - expected).norm() <= bound * expected.norm()


@pytest.fixture
def threads() -> Iterator[None]:
    """Whatever a test sets, the number of threads is afterwards as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("queries", [1, 70])
def test_same_bits_for_any_number_of_threads(queries: int) -> None:
    key, value = operands(tokens=1500)
    q, found = gaussian((2, 6, queries, 64)).bfloat16(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(attend(q, key, value))
    assert all(torch.equal(other, found[0]) for other in found[1:])
