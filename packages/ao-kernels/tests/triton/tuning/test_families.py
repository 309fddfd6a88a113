"""What each kernel may be launched with: at most four settings a problem, the rule's among them."""

from __future__ import annotations

import pytest
import torch

from ao_core import WHOLE, Call, Spec
from ao_core.ext import registry
from ao_kernels.triton.bsr import launch as bsr
from ao_kernels.triton.bsr.layout import SIDES
from ao_kernels.triton.scaled_mm import launch as scaled_mm
from ao_kernels.triton.scaled_mm import records as scaled_mm_records
from ao_kernels.triton.shared import tile_config
from ao_kernels.triton.tuning.store import bucket
from ao_kernels.triton.w4a8 import launch as w4a8
from ao_kernels.triton.w4a8 import layout as w4a8_layout
from ao_kernels.triton.w4a8 import records as w4a8_records
from ao_kernels.triton.weight_only import launch, op
from ao_kernels.triton.weight_only import records as weight_only_records
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.layout import tiling

CPU = torch.device("cpu")
ROWS = (1, 3, 16, 17, 31, 33, 64, 65, 120, 129, 130, 193, 256, 1000, 1025, 5000)
WIDTHS = (128, 1024, 1152, 4096, 6144, 14336, 28672)


@pytest.mark.parametrize("numbers", ["int4", "uint4", "int8"])
def test_planes(numbers):
    fmt = known(registry.dtypes.get(numbers))
    for n in WIDTHS:
        for k in WIDTHS:
            tiles = tiling(n, k, 128, fmt)
            for m in ROWS:
                found = launch.launch_configs_of(tiles, m, 132)
                assert launch.rule(tiles, m, 132) in found
                assert len(set(found)) == len(found) <= 4
                assert found == launch.launch_configs_of(tiles, bucket(m), 132)
                assert all(1 <= each.splits <= tiles.k_tiles for each in found)


@pytest.mark.parametrize("zero_point", [False, True])
def test_planes_beside_activations_in_8_bits(zero_point):
    for n in WIDTHS:
        for k in WIDTHS:
            tiles = w4a8_layout.tiling(n, k, 128)
            for m in ROWS:
                found = w4a8.launch_configs_of(tiles, m, 132, zero_point=zero_point)
                assert w4a8.rule(tiles, m, 132, zero_point=zero_point) in found
                assert len(set(found)) == len(found) <= 4
                assert found == w4a8.launch_configs_of(tiles, bucket(m), 132, zero_point=zero_point)


def test_blocks():
    for side in SIDES:
        for rows in (4, 16, 64, 448):
            for blocks in (0, 1, rows * 15, rows * 64, rows * 700):
                for m in ROWS:
                    sizes = (side, m, torch.bfloat16, blocks, rows, 132)
                    found = bsr.launch_configs_of(*sizes)
                    assert bsr.rule(*sizes) in found
                    assert len(set(found)) == len(found) <= 4


def test_scaled():
    for m in ROWS:
        for n in WIDTHS:
            for largest in (True, False):
                found = scaled_mm.tile_configs_of(m, largest=largest)
                assert scaled_mm.tile_config_of(m, n, 1, 132, largest=largest) in found
                assert found == scaled_mm.tile_configs_of(bucket(m), largest=largest)
                assert len(set(found)) == len(found) <= 4


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Sizes follow from those of an H100, also where there is another device."""
    for module in (weight_only_records, scaled_mm_records, w4a8_records):
        monkeypatch.setattr(module, "current_device", lambda: CPU)


def described(name, spec, shape, m, dtype=torch.bfloat16):
    kernel = registry.kernels.get(name)
    op, x_shape = kernel.op, (m, shape[-1])
    return kernel.describe(Call(op, spec, shape, x_shape, dtype, "cuda"))


def test_explain_says_what_serves_and_why():
    planes = Spec("int4", (1, 128), "bfloat16", layout="plane16")
    assert described("triton_plane16_linear", planes, (4096, 4096), 1) == (
        "tiles of 16 rows, split-K 4, 4 stages (rule), sums in float32"
    )
    both = Spec("int4", (1, 32), layout="plane32", act=Spec("uint8", (1, WHOLE), zero_point="int"))
    assert described("triton_int8_int4_linear", both, (4096, 4096), 200) == (
        "activations as uint8, tiles of 128 rows, split-K 2, 3 stages (rule)"
    )
    act = Spec("f8e4m3", (1, WHOLE))
    rows = Spec("f8e4m3", (1, WHOLE), act=act)
    found = described("triton_float8_mm", rows, (4096, 4096), 4096)
    assert found == "tiles of 128 × 256 (rule), scales inside"
    experts = described("triton_float8_grouped_mm", rows, (8, 4096, 4096), 64)
    assert experts == "tiles of 64 × 128 (rule), scales inside"


def test_the_problem_that_is_explained_is_the_one_that_is_launched(monkeypatch):
    """From a call, which has names of dtypes, the same key as from tensors."""
    found = []
    monkeypatch.setattr(
        tile_config, "find", lambda case: (found.append(case.problem), (case.rule, "rule"))[1]
    )
    zeros = {"none": None, "int": torch.uint8, "float": torch.bfloat16}
    for zero_point, dtype in zeros.items():
        numbers = "int4" if zero_point == "none" else "uint4"
        spec = Spec(numbers, (1, 64), "bfloat16", zero_point, layout="plane16")
        described("triton_plane16_linear", spec, (512, 1024), 3)
        tiles = tiling(512, 1024, 64, known(registry.dtypes.get(numbers)))
        bf16 = torch.bfloat16
        kind = tile_config.zero_kind(None if dtype is None else torch.empty(1, dtype=dtype))
        case = launch.case_of(numbers, tiles, 64, bf16, "bfloat16", kind, 4, CPU, sparse=False)
        assert found[-1] == case.problem


def test_tracing_chooses_nothing(monkeypatch):
    def choose(case, run):
        raise AssertionError("there is nothing to launch")

    monkeypatch.setattr(op, "choose", choose)
    monkeypatch.setattr(scaled_mm, "choose", choose)
    with torch._subclasses.FakeTensorMode():
        x, words = torch.empty(3, 256).bfloat16(), torch.empty(1, 1, 128, 64, dtype=torch.int16)
        scale, table = torch.empty(1, 2, 128), torch.empty(16, dtype=torch.int32)
        out = op.plane16_linear(x, words, scale, None, table, None, 128, 256, 128, "int4")
        assert out.shape == (3, 128)
        codes = torch.empty(32, 64, dtype=torch.int8)
        ones = torch.empty(32)
        out = scaled_mm.scaled_matmul(codes, codes, ones, ones, "row", "row", torch.float16)
        assert out.shape == (32, 32)
