"""The decoder that is measured, how copies of weights differ, and how bars are judged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ao_core import Spec, quantize_tensor
from workspace import ROOT

CPU = ROOT / "packages" / "ao-kernels" / "benchmarks" / "cpu"
GPU = CPU.with_name("gpu")


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder's modules, and the decoder, can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(GPU))
    monkeypatch.syspath_prepend(str(CPU))
    yield
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").parent in (CPU, GPU):
            del sys.modules[name]


@pytest.fixture
def decoder(cpu: None) -> ModuleType:
    import decoder

    return decoder


@pytest.fixture
def bars(cpu: None) -> ModuleType:
    import bars

    return bars


def test_decoding_one_by_one_agrees_with_a_prefill(decoder: ModuleType) -> None:
    shape = decoder.Shape(layers=2, dim=64, heads=4, kv_heads=2, ffn=96, vocab=50, context=12)
    model = decoder.random_model(shape, torch.float32)
    assert sum(p.numel() for p in model.parameters() if p.dim() > 1) == shape.parameters
    empty = partial(decoder.empty_cache, shape, torch.float32)
    cache, rope = empty(), decoder.rope_table(shape, torch.float32)
    tokens = torch.arange(10) * 3 % 50
    for position, token in enumerate(tokens.split(1)):
        place = decoder.after(position, 1)
        if (
            position % 2
        ):  # where only the device knows, all of the cache is attended to, under a mask
            place = decoder.anywhere(torch.tensor([position]), 12)
        one = model(token, cache, rope, place)
        text = decoder.after(0, position + 1)
        whole = model(tokens[: position + 1], empty(), rope, text)
        torch.testing.assert_close(one, whole)
    assert 0.5 < one.std() < 2
    swapped = model(tokens[[1, 0, *range(2, 10)]], empty(), rope, text)
    assert (swapped - whole).abs().max() > 1e-3  # positions matter


def test_random_matrices_differ(decoder: ModuleType) -> None:
    shape = decoder.Shape(layers=2, dim=64, heads=4, kv_heads=2, ffn=64, vocab=64)
    matrices = [p for p in decoder.random_model(shape).parameters() if p.dim() > 1]
    rows = torch.cat([p.view(-1)[:64].view(1, -1) for p in matrices])
    assert len(rows.unique(dim=0)) == len(matrices)


def test_no_page_of_two_copies_is_equal(cpu: None) -> None:
    from rotation import ROTATED, copies, rolled, shifted

    weight = torch.randn(64, 2048, dtype=torch.bfloat16)
    quantized = quantize_tensor(weight, Spec("int4", (1, 32), "bfloat16", layout="packed"))
    assert len(copies(ROTATED)) == 2
    assert len(copies(ROTATED // 10)) == 11
    for make, tensor in ((rolled, weight), (shifted, quantized)):
        found = [make(tensor, number) for number in copies(ROTATED // 40)]
        bytes_ = [(w.qdata if tensor is quantized else w).view(torch.uint8) for w in found]
        pages = torch.cat([part.reshape(-1, 4096) for part in bytes_])
        assert len(pages.unique(dim=0)) == len(pages)
    assert shifted(quantized, 1).spec == quantized.spec


def test_a_bar_is_met_where_the_whole_interval_reaches_it(bars: ModuleType) -> None:
    bar = bars.Bar("ours", "peer", 2, 3)
    samples = {"ours": [1.0] * 10, "peer": [2.0] * 9 + [9.0]}
    (row,) = bars.compared([bar], samples, "M = 1")
    assert row == {
        "case": "M = 1: ours × peer",
        "bar": 2,
        "aim": 3,
        "measured": 2.0,
        "95 %": "2 to 2",
        "verdict": "met",
    }
    slower = {"ours": [1.1] * 10, "peer": [2.0] * 10}
    assert bars.compared([bar], slower, "")[0]["verdict"] == "missed"
    assert bars.compared([bar], {"ours": [1.0]}, "")[0]["verdict"] == "not measured"
    uncertain = {"ours": [1.0] * 10, "peer": [1.5] * 4 + [2.1] * 6}
    (row,) = bars.compared([bar], uncertain, "")
    assert (row["measured"], row["95 %"], row["verdict"]) == (2.1, "1.5 to 2.1", "missed")


def test_rounds_that_are_slow_for_all_do_not_pass_a_bar(bars: ModuleType) -> None:
    """Ten percent of quick rounds, in which the peer happened to be slow, would pass by percentiles."""
    bar = bars.Bar("ours", "peer", 1.05, None)
    samples = {"ours": [1.0] * 8 + [0.8] * 2, "peer": [0.92] * 8 + [0.91] * 2}
    assert bars.compared([bar], samples, "")[0]["verdict"] == "missed"


@pytest.mark.parametrize(("seconds", "verdict"), [(1.4, "met"), (1.5, "met"), (1.6, "missed")])
def test_bars_may_be_upper_ones(bars: ModuleType, seconds: float, verdict: str) -> None:
    assert bars.at_most("quantize_", 1.5, seconds)["verdict"] == verdict


def test_bars_name_contenders_that_there_are(bars: ModuleType) -> None:
    import ggml
    from decoder import Shape
    from decoding import makers
    from ours import ours
    from sparse import kinds
    from torch_linear import torch_linear

    linear = {*torch_linear(), *ours(), *(f"llama.cpp {kind}, fp32" for kind in ggml.TYPES)}
    assert {name for bar in bars.LINEAR for name in (bar.ours, bar.peer)} <= linear
    sparse = {(kind.name, rows) for rows in (1, 16, 256) for kind in kinds(rows)}
    assert {(bar.ours, bar.rows) for bar in bars.SPARSE} <= sparse
    assert {bar.peer for bar in bars.SPARSE} == {bars.F_LINEAR} <= set(torch_linear())
    torchao = {"torchao int4 g32", "torchao int4 g32, compiled"}
    models = {*makers("a folder", Shape(), 2), *torchao}
    named = {name for bar in (*bars.DECODE, *bars.PREFILL) for name in (bar.ours, bar.peer)}
    assert named <= models
