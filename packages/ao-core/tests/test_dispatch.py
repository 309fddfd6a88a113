"""The kernel tables: order, bands, refusals, freezing, and the kernels remembered on a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import ao_core
from ao_core import WHOLE, Call, Kernel, QTensor, Spec, quantize_tensor
from ao_core.dispatch import (
    BANDS,
    _process_band,
    candidates,
    fingerprint,
    pinned_band,
    select,
)
from ao_core.errors import ConfigError, FrozenError, UnsupportedOp
from ao_core.registry import registry

SPEC = Spec("int8", (1, WHOLE), "bfloat16")


def _call(**changes: object) -> Call:
    call = Call("linear", SPEC, (32, 64), (1, 64), torch.float32, "cpu")
    return replace(call, **changes)  # type: ignore[arg-type]


@pytest.fixture
def weight() -> QTensor:
    return quantize_tensor(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), SPEC)


@pytest.fixture
def clean_registry() -> Iterator[None]:
    """Kernels added in a test do not outlive it."""
    before = dict(registry.kernels._records)
    yield
    registry.kernels._records.clear()
    registry.kernels._records.update(before)
    registry.reopen()


def test_highest_priority_that_accepts_wins() -> None:
    found = candidates(_call())
    assert [c.kernel.priority for c in found] == sorted(
        (c.kernel.priority for c in found), reverse=True
    )
    assert select(_call()).name == "row_scaled"
    assert select(_call(x_dtype=torch.bfloat16)).name == "int8pack"
    assert select(_call(x_dtype=torch.float16)).name == "reference_linear"


def test_batch_decides() -> None:
    assert select(_call(x_dtype=torch.bfloat16, x_shape=(2, 4, 64))).name == "int8pack"
    assert select(_call(x_dtype=torch.bfloat16, x_shape=(9, 64))).name == "row_scaled"


def test_every_refusal_has_a_reason() -> None:
    for found in candidates(_call(x_dtype=torch.float16)):
        if found.kernel.name != "reference_linear":
            assert found.refusal is not None
            assert " " in found.refusal


def test_pinned_band(weight: QTensor) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    fast = F.linear(x, weight)
    with ao_core.kernels("reference"):
        assert pinned_band() == "reference"
        assert select(_call()).name == "reference_linear"
        torch.testing.assert_close(F.linear(x, weight), fast)
    assert pinned_band() is None
    with ao_core.kernels("cuda"), pytest.raises(UnsupportedOp, match="band is pinned to 'cuda'"):
        select(_call())


def test_band_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AO_KERNELS", "fastest")
    _process_band.cache_clear()
    try:
        with pytest.raises(ConfigError, match="AO_KERNELS='fastest'.*reference"):
            pinned_band()
        monkeypatch.setenv("AO_KERNELS", "reference")
        assert pinned_band() == "reference"
        monkeypatch.setenv("AO_KERNELS", "torch")  # read once
        assert pinned_band() == "reference"
    finally:
        _process_band.cache_clear()
    with pytest.raises(ConfigError, match="band='slow'"), ao_core.kernels("slow"):
        pass


def test_no_kernel_is_an_error_with_the_op() -> None:
    with pytest.raises(UnsupportedOp, match="no kernel serves convolve of layout 'plain' on cpu"):
        select(_call(op="convolve"))


def test_tables_freeze_and_reopen(clean_registry: None, weight: QTensor) -> None:
    x = torch.zeros(1, 64)
    F.linear(x, weight)
    mine = Kernel("mine", "linear", "plain", "cpu", lambda x, w, b: x.new_full((1, 32), 7.0), 60)
    with pytest.raises(FrozenError, match="reopen"):
        ao_core.register(mine)
    ao_core.reopen()
    ao_core.register(mine)
    # the kernel bound on the weight before is forgotten
    assert F.linear(x, weight).eq(7).all()
    with ao_core.kernels("torch"):
        assert F.linear(x, weight).eq(0).all()
    assert F.linear(x, weight).eq(7).all()


def test_unavailable_kernel_says_why(clean_registry: None) -> None:
    asked = []

    def unavailable() -> str:
        asked.append(1)
        return "needs a quantum computer"

    ao_core.reopen()
    ao_core.register(Kernel("far", "linear", "plain", "cpu", lambda x, w, b: x, 200, unavailable))
    for _ in range(3):
        reasons = {c.kernel.name: c.refusal for c in candidates(_call())}
    assert reasons["far"] == "needs a quantum computer"
    assert len(asked) == 1


def test_wrong_input_width_is_named(weight: QTensor) -> None:
    with pytest.raises(UnsupportedOp, match=r"\(3, 63\) does not fit a weight of \(32, 64\)"):
        F.linear(torch.zeros(3, 63), weight)


def test_bound_kernels_do_not_grow_without_end(weight: QTensor) -> None:
    for rows in range(1, 600):
        F.linear(torch.zeros(rows, 64), weight)
    assert len(weight._bound) <= 256


def test_autocast_decides_the_dtype_of_the_matmul(weight: QTensor) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    bias = torch.ones(32)
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, weight, bias)
        again = F.linear(x.clone().requires_grad_(), weight, bias)
    assert y.dtype == again.dtype == torch.bfloat16
    assert torch.equal(y, F.linear(x.bfloat16(), weight, bias.bfloat16()))
    torch.testing.assert_close(y, again, rtol=2e-2, atol=2e-2)
    assert weight.dtype == torch.float32


def test_fingerprint_of_the_kernels(clean_registry: None, weight: QTensor) -> None:
    """It is in the key of compiled code that torch keeps on disk."""
    before, key = fingerprint("cpu"), weight._stable_hash_for_caching()
    assert fingerprint("cpu") == before
    with ao_core.kernels("reference"):
        assert fingerprint("cpu") != before
        assert weight._stable_hash_for_caching() != key
    assert (fingerprint("cpu"), weight._stable_hash_for_caching()) == (before, key)
    seen = {before}
    for fn in (lambda x, w, b: x, lambda x, w, b: x + 1):
        ao_core.reopen()
        registry.kernels._records.pop("mine", None)
        ao_core.register(Kernel("mine", "linear", "plain", "cpu", fn, 60))
        assert fingerprint("cpu") not in seen
        seen.add(fingerprint("cpu"))


def test_conversions_work_under_every_pin(weight: QTensor) -> None:
    dense = weight.dequantize()
    for band in BANDS:
        with ao_core.kernels(band):
            again = quantize_tensor(dense, SPEC)
            assert torch.equal(weight.dequantize(), dense)
        assert torch.equal(again.dequantize(), quantize_tensor(dense, SPEC).dequantize())


def test_description_is_for_calls_that_are_accepted(clean_registry: None) -> None:
    ao_core.reopen()
    kernel = Kernel(
        "mine", "linear", "plain", "cpu", lambda x, w, b: x, 60,
        refuses=lambda call: None if call.m < 9 else "is for fewer rows",
        describe=lambda call: f"{call.m} rows at a time",
    )  # fmt: skip
    ao_core.register(kernel)
    found = {
        rows: next(c for c in candidates(_call(x_shape=(rows, 64))) if c.kernel is kernel)
        for rows in (4, 9)
    }
    assert [found[rows].description for rows in (4, 9)] == ["4 rows at a time", ""]
    w = quantize_tensor(torch.ones(32, 64), SPEC)
    explained = ao_core.explain(w, rows=(4,))
    assert "→ mine (in-process, priority 60): 4 rows at a time" in str(explained)
    (call,) = explained.to_dict()["weights"][0]["calls"]
    assert call["candidates"][0]["description"] == "4 rows at a time"
