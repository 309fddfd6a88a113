"""Every benchmark that needs nothing but the packages runs, at a tiny size, and records what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ao_core.testing.warm import run_python
from workspace import ROOT

OVERHEAD = ROOT / "packages" / "ao-core" / "benchmarks" / "bench_overhead.py"
IMPORT_TIME = ROOT / "packages" / "ao-core" / "benchmarks" / "bench_import_time.py"
QUANTIZE_TIME = ROOT / "packages" / "ao-quant" / "benchmarks" / "bench_quantize_time.py"
STATIC = ROOT / "packages" / "ao-quant" / "benchmarks" / "bench_static.py"
CHECKPOINT = ROOT / "packages" / "ao-quant" / "benchmarks" / "bench_checkpoint.py"

BLOCK = ROOT / "packages" / "ao-float8" / "benchmarks" / "gpu" / "bench_block.py"
GGUF = ROOT / "packages" / "ao-quant" / "benchmarks" / "bench_gguf.py"
OPTIMIZER_STEP = ROOT / "packages" / "ao-optim" / "benchmarks" / "bench_step.py"
STRUCTURED = ROOT / "packages" / "ao-sparsity" / "benchmarks" / "bench_structured.py"

CPU = ROOT / "packages" / "ao-kernels" / "benchmarks" / "cpu"


def rows(script: Path, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The rows that a benchmark writes."""
    path = folder / "result.json"
    run_python(script, "--json", path, *options, check=True)
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert len({tuple(row) for row in found}) == 1  # all have the same columns
    return found


@pytest.mark.slow
def test_overhead(tmp_path: Path) -> None:
    found = rows(OVERHEAD, tmp_path, "--rounds=2", "--repeats=3")
    assert {row["layer"] for row in found} == {"64×64", "256×256"}
    assert {row["mode"] for row in found} == {
        "no_grad", "inference_mode", "grad", "grad, backward", "pinned",
    }  # fmt: skip
    names = {row["contender"] for row in found}
    assert {"nn.Linear", "dispatch", "int8", "int8, bare kernel"} <= names
    assert all(row["µs"] > 0 for row in found)
    assert all(row["× nn.Linear"] == 1 for row in found if row["contender"] == "nn.Linear")
    assert all(
        (row["over its kernel, µs"] != "") == (row["contender"] in {"int8", "int4", "int8 dynamic"})
        for row in found
        if row["mode"] != "grad, backward"  # bare kernels have no backward pass
    )


@pytest.mark.slow
def test_import_time(tmp_path: Path) -> None:
    first, *others = rows(IMPORT_TIME, tmp_path, "--rounds=1")
    assert first["statement"] == "import torch"
    for row in others:
        assert 0 < row["added ms"] < first["added ms"]
        assert 0 < row["modules added"] < 200


@pytest.mark.slow
def test_hadamard(tmp_path: Path) -> None:
    found = rows(CPU / "bench_hadamard.py", tmp_path, "--sizes=16,24", "--rows=2", "--rounds=2")
    assert {row["orders"] for row in found} == {"16", "12 × 2"}
    assert {row["contender"] for row in found} == {"dense", "torch", "ao-kernels"}
    assert all(row["x dense"] == 1 for row in found if row["contender"] == "dense")
    assert all(row["x torch"] == 1 for row in found if row["contender"] == "torch")


@pytest.mark.slow
def test_gguf(tmp_path: Path) -> None:
    found = rows(GGUF, tmp_path, "--rounds=1", "--rows=4")
    assert {row["encoder"] for row in found} == {"ao", "gguf"}
    assert all(row["bytes of ao"] == "yes" for row in found)
    assert all(row["dB"] > 10 and row["ns a weight"] > 0 for row in found)


@pytest.mark.slow
def test_static(tmp_path: Path) -> None:
    found = rows(STATIC, tmp_path, "--rounds=1")
    assert {row["layer"] for row in found} == {"dense", "static", "dynamic", "dynamic, plain"}
    assert {row["kernel"] for row in found if row["layer"] == "static"} == {"cpu_tiles8_linear"}
    assert all(row["µs"] > 0 for row in found)


@pytest.mark.slow
def test_quantize_time(tmp_path: Path) -> None:
    found = rows(QUANTIZE_TIME, tmp_path, "--rounds=1", "--parameters=1", "--size=2048")
    by_recipe = {row["recipe"]: row for row in found}
    assert by_recipe["copy"]["after GB"] == by_recipe["copy"]["model GB"]
    model = by_recipe["copy"]["model GB"]
    assert 0.5 < by_recipe["int8_weight_only"]["after GB"] / model < 0.51
    assert 0.25 < by_recipe["int4_weight_only"]["after GB"] / model < 0.27
    assert all(row["seconds"] > 0 and row["peak over model GB"] > 0 for row in found)


@pytest.mark.slow
def test_linear_layers_on_the_cpu(tmp_path: Path) -> None:
    options = (
        "--threads=1",
        "--shapes=256x512",
        "--m=1,16",
        "--percent=5",
        "--formats=F.linear,ao int4 g32,ao fp8",
    )
    found = rows(CPU / "bench_linear.py", tmp_path, *options)
    by_name = {(row["contender"], row["M"]): row for row in found}
    assert {m for _, m in by_name} == {1, 16}
    assert all(row["K × N"] == "256×512" and row["p10"] <= row["µs"] for row in found)
    dense, ours = by_name["F.linear bf16", 1], by_name["ao int4 g32, bf16", 1]
    assert (dense["× F.linear"], dense["× F.linear, 95 %"]) == (1, "1 to 1")
    assert dense["kernel"] == ""
    assert ours["kernel"]
    assert dense["MiB"] == 256 * 512 * 2 / 2**20
    assert 0.28 <= ours["MiB"] / dense["MiB"] < 0.35  # 4.5 bits of 16, and perhaps padding
    assert by_name["reader", 1]["share of read"] == 1
    page = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["page"]
    assert "reader" not in {row["contender"] for row in page}
    assert all(" (" in row["M = 16"] for row in page)


@pytest.mark.slow
def test_sparse_linear_layers_on_the_cpu(tmp_path: Path) -> None:
    options = ("--threads=1", "--n=128", "--k=512", "--percent=1", "--copies=2", "--m=1,256")
    found = rows(CPU / "bench_sparse.py", tmp_path, *options)
    by_name = {(row["weight"], row["M"]): row for row in found}
    dense, ours = by_name["F.linear bf16", 256], by_name["bsr 64×64 80% bf16", 256]
    assert (dense["× dense"], dense["95 %"]) == (1, "1 to 1")
    assert (ours["kernel"], ours["bar"], ours["limit"]) == ("bsr_cpu_linear", 3, pytest.approx(5))
    assert ours["verdict"] in ("met", "missed")
    assert by_name["2:4 bf16", 1]["kernel"] == "cpu_two_four_linear"
    assert by_name["2:4 bf16", 1]["MiB"] == 0.5625 * dense["MiB"]
    assert all(0 < row["p10 ms"] <= row["median ms"] for row in found)


@pytest.mark.slow
def test_decoder_on_the_cpu(tmp_path: Path) -> None:
    options = (
        "--threads=1",
        "--layers=1",
        "--tokens=3",
        "--percent=1",
        "--contenders=torch bf16,ao int4 g32",
    )
    dense, *quantized = rows(CPU / "bench_decoder.py", tmp_path, *options)
    assert dense["contender"] == "torch bf16"
    assert dense["× torch bf16"] == dense["prefill × torch bf16"] == 1
    found = {row["contender"]: row for row in quantized}
    compiled = {name for name in found if name.endswith(", compiled")}
    assert compiled == {"torch bf16, compiled", "ao int4 g32, compiled"}
    assert set(found) - compiled == {"ao int4 g32", "ao int4 g32 dynamic"}
    for name, row in found.items():
        assert row["tokens/s"] > 0
        if "ao" in name:
            assert 0.28 < row["GB a token"] / dense["GB a token"] < 0.45  # the head keeps 8 bits
        if name in compiled:  # only tokens are
            assert row["prefill tokens/s"] == ""
        else:
            assert row["prefill tokens/s"] > row["tokens/s"] / 100


@pytest.mark.slow
def test_quantizing_a_model_on_the_cpu(tmp_path: Path) -> None:
    options = ("--threads=1", "--layers=1", "--rounds=1", "--contenders=ao int4 g32")
    found = rows(CPU / "bench_quantize_model.py", tmp_path, *options)
    assert {row["contender"] for row in found} == {"ao int4 g32", "ao int4 g32 dynamic"}
    for row in found:
        assert row["seconds"] > 0
        # not "1 <=": the system counts resident pages for each core apart, and adds them up now and then
        assert 0.8 < row["peak"] < 3
        assert 0.28 < row["after"] < 0.45  # the head keeps 8 bits


@pytest.mark.slow
def test_a_checkpoint_larger_than_memory(tmp_path: Path) -> None:
    options = ("--size=0.01", "--vocabulary=4000", "--kills=1", "--recipes=int4_weight_only")
    (row,) = rows(CHECKPOINT, tmp_path, *options, f"--folder={tmp_path}")
    assert row["checkpoint GB"] == pytest.approx(2 * 4000 * 4096 * 2 / 1e9, rel=1e-3)
    assert row["peak GB"] < row["stated GB"] == pytest.approx(0.256 + 4 * 4000 * 4096 / 1e9)
    assert row["same bytes"] == "yes"
    assert not list(tmp_path.glob("tmp*"))


@pytest.mark.slow
def test_training_a_block(tmp_path: Path) -> None:
    options = (
        *(
            "--device=cpu",
            "--compiled=0",
            "--warm-up=0",
            "--rounds=2",
            "--recipes=rowwise,blockwise",
        ),
        *("--width=128", "--tokens=32", "--sequence=16"),
    )
    found = {row["contender"]: row for row in rows(BLOCK, tmp_path, *options)}
    assert {"bfloat16", "ao rowwise", "ao blockwise"} <= set(found)
    assert found["bfloat16"]["× bfloat16"] == 1
    assert found["ao blockwise"]["× torchao"] == ""
    for row in found.values():
        assert row["tokens/s"] == pytest.approx(32 / row["ms"] * 1e3)


@pytest.mark.slow
def test_optimizer_step(tmp_path: Path) -> None:
    found = rows(OPTIMIZER_STEP, tmp_path, "--elements=100000", "--tensors=6", "--rounds=1")
    names = {row["optimizer"]: row for row in found}
    assert {"torch AdamW, fused", "ao AdamW8bit", "ao AdamW4bit", "ao AdamWFp8"} <= set(names)
    assert names["torch AdamW, fused"]["times fused"] == 1
    assert 2 < names["ao AdamW8bit"]["bytes of state per parameter"] < 3


@pytest.mark.slow
def test_steps_of_all_rules(tmp_path: Path) -> None:
    script = OPTIMIZER_STEP.with_name("bench_rules.py")
    found = rows(script, tmp_path, "--elements=100000", "--tensors=6", "--rounds=1", "--only=SGD")
    assert [row["optimizer"] for row in found] == ["SGD8bit"]


@pytest.mark.slow
def test_structured_removal(tmp_path: Path) -> None:
    found = rows(STRUCTURED, tmp_path, "--rounds=1", "--k=1024", "--n=4096", "--m=4")
    by_name = {row["contender"]: row for row in found}
    assert list(by_name) == ["dense", "25% removed", "50% removed", "75% removed"]
    assert by_name["dense"]["× dense"] == 1
    assert by_name["50% removed"]["by flops"] == pytest.approx(2, rel=0.01)
    assert by_name["75% removed"]["MiB"] == pytest.approx(4, rel=0.02)
    assert all(row["ms"] >= row["p10"] > 0 for row in found)
