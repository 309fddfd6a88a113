"""The layout `plane16`, and what its kernels say where they cannot run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ao_core import WHOLE, Call, Spec, lut_dtype, quantize_tensor
from ao_core.ext import registry, repack, to_layout
from ao_core.ext.numerics import unpack_bits
from ao_core.testing import LayoutSuite
from ao_core.testing.base import gaussian, same_bits
from ao_kernels.triton.shared import device
from ao_kernels.triton.shared.tile_config import splits_of
from ao_kernels.triton.weight_only import launch, samples
from ao_kernels.triton.weight_only.formats import format_of, known
from ao_kernels.triton.weight_only.layout import tiling

#: scales in e4m3 that have one scale themselves, as those of NVFP4
NESTED = Spec("f8e4m3", (WHOLE, WHOLE))


class TestPlane16(LayoutSuite):
    layout = "plane16"
    specs = (
        Spec("f6e3m2", (1, 32), "float16"),
        Spec("uint4", (1, 64), "float16", "int"),
        Spec("f4e2m1", (1, 16), NESTED),
    )


class TestPlane16Bytes(LayoutSuite):
    layout = "plane16_bytes"
    specs = (Spec("f8e4m3", (1, WHOLE), "float32"),)
    shapes = ((33, 70),)


@pytest.mark.slow
class TestPlane16Widths(LayoutSuite):
    layout = "plane16"
    specs = (
        *(Spec(f"int{bits}", (1, 64), "float16") for bits in (1, 2, 3, 5, 6, 7, 8)),
        Spec("uint3", (1, 32), "float16", "int"),
        Spec("ternary", (1, WHOLE), "float16"),
        Spec("f3e1m1", (1, 128), "float16"),
        Spec("f5e2m2", (1, 256), "float16"),
    )
    shapes = ((33, 70),)


@pytest.mark.slow
class TestPlane16BytesKinds(LayoutSuite):
    layout = "plane16_bytes"
    specs = (Spec("f8e5m2", (1, 64), "float32"), Spec("uint8", (1, 128), "float32", "int"))
    shapes = ((33, 70),)


LINEAR = registry.kernels.get("triton_plane16_linear")


def call(**changes):
    fields = {
        "op": "linear",
        "spec": Spec("int4", (1, 128), "bfloat16", layout="plane16"),
        "weight_shape": (256, 512),
        "x_shape": (1, 512),
        "x_dtype": torch.bfloat16,
        "device": "cuda",
    }
    return Call(**{**fields, **changes})


def test_where_each_code_lies():
    """Word kk of a row holds the codes of columns kk, kk + 64, kk + 128, kk + 192 of its tile."""
    q = quantize_tensor(
        gaussian((130, 300)), Spec("uint4", (1, 64), zero_point="int", layout="packed")
    )
    words = to_layout(q, "plane16").qdata.squeeze(2).to(torch.int32) & 0xFFFF
    assert words.shape == (2, 2, 128, 64)
    codes = torch.zeros(256, 512, dtype=torch.int32)
    scale, zero_point = q.scale.repeat_interleave(64, 1), q.zero_point.repeat_interleave(64, 1)
    values = q.dequantize(torch.float32) / scale[:, :300] + zero_point[:, :300]
    codes[:130, :300] = values.round().to(torch.int32)
    for plane in range(4):
        expected = codes.view(2, 128, 2, 4, 64)[:, :, :, plane].transpose(1, 2)
        assert torch.equal(words >> 4 * plane & 15, expected)


def test_where_the_bits_of_wider_codes_lie():
    """By the words of `triton.words`: three words have six codes of 6 bits, and two in what is left over."""
    q = quantize_tensor(gaussian((3, 128)), Spec("f6e3m2", (1, WHOLE), layout="packed"))
    words = to_layout(q, "plane16").qdata.to(torch.int32) & 0xFFFF
    assert words.shape == (1, 1, 3, 128, 16)
    codes = unpack_bits(q.qdata, 6, 128).view(3, 8, 16)
    a, b, c = words[0, 0, :, :3]
    for word, low, high in ((a, 0, 1), (b, 2, 3), (c, 4, 5)):
        assert torch.equal(word & 63, codes[:, low])
        assert torch.equal(word >> 8 & 63, codes[:, high])
    for container, plane in ((0, 6), (8, 7)):
        left = [word >> container + 6 & 3 for word in (a, b, c)]
        assert torch.equal(left[0] | left[1] << 2 | left[2] << 4, codes[:, plane])


FORMATS = [
    ("int2", "none"),
    ("uint3", "int"),
    ("f5e3m1", "none"),
    ("int7", "none"),
    ("ternary", "none"),
    ("f3e1m1", "none"),
    ("int4", "none"),
    ("uint4", "int"),
    ("uint4", "float"),
    ("nf4", "none"),
    ("f4e2m1", "none"),
]


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 300, WHOLE])
@pytest.mark.parametrize(("name", "zero_point"), [*FORMATS, ("uint8", "int"), ("f8e5m2", "none")])
def test_and_back(group, name, zero_point):
    """Bit for bit, whatever is padded; 300 is a group of the whole row, and of more than that."""
    canonical, planes = ("packed", "plane16")
    if registry.dtypes.get(name).bits == 8:
        if group == 256:
            group = 128  # no more columns are in a tile
        canonical, planes = ("plain", "plane16_bytes")
    for shape in ((130, 300), (1, 1), (128, 256)):
        q = quantize_tensor(
            gaussian(shape), Spec(name, (1, group), "float16", zero_point, canonical)
        )
        there = to_layout(q, planes)
        assert there.spec.layout == planes
        back = to_layout(there, canonical)
        assert all(same_bits(back.parts[part], q.parts[part]) for part in q.part_names)


@pytest.mark.parametrize("scale", ["e8m0", "e4m3", NESTED], ids=str)
@pytest.mark.parametrize(
    ("name", "group"), [("f4e2m1", 16), ("nf4", 64), ("int4", 256), ("int8", 32), ("f8e4m3", WHOLE)]
)
def test_scales_of_8_bits_and_back(name, group, scale):
    """Bit for bit; scales of a row and a tile are neighbours."""
    bits = registry.dtypes.get(name).bits
    canonical, planes = ("plain", "plane16_bytes") if bits == 8 else ("packed", "plane16")
    for shape in ((130, 300), (1, 1)):
        q = quantize_tensor(gaussian(shape), Spec(name, (1, group), scale, layout=canonical))
        there = to_layout(q, planes)
        back = to_layout(there, canonical)
        assert same_bits(back.qdata, q.qdata)
        grid, found = q.scale, back.scale
        if scale is NESTED:
            assert same_bits(found.scale, grid.scale)
            grid, found = grid.qdata, found.qdata
        assert same_bits(found, grid)
        tiles = tiling(*shape, group if group != WHOLE else shape[1], known(q.format))
        codes = there.parts["scale"].view(torch.uint8)
        places = codes.view(tiles.n_tiles, -1, 128, tiles.groups_per_tile)
        n, at = shape[0] - 1, grid.shape[1] - 1
        block, row, tile, place = (
            n // 128,
            n % 128,
            at // tiles.groups_per_tile,
            at % tiles.groups_per_tile,
        )
        assert places[block, tile, row, place] == grid.view(torch.uint8)[n, at]


@pytest.mark.parametrize(
    ("spec", "shape", "words"),
    [
        (Spec("dynamic8", (1, 64)), (16, 64), "no assembly that decodes dynamic8"),
        (Spec("codebook3", (1, 64)), (16, 64), "codebook3 one for each block"),
        (Spec("int6", (1, 256)), (16, 512), "needs groups of (16, 32, 64, 128)"),
        (Spec("uint4", (1, 64)), (16, 64), "zero points of unsigned integers"),
        (Spec("int4", (1, 64), zero_point="int"), (16, 64), "zero points of unsigned integers"),
        (Spec("int4", (1, 64), act=Spec("int8", (1, WHOLE))), (16, 64), "activations"),
        (Spec("nf4", (1, 64), Spec("int8", (1, 256))), (16, 64), "f8e4m3 with one float32"),
        (Spec("int4", (1, 8)), (16, 64), "needs groups of"),
        (Spec("int4", (1, 48)), (16, 96), "needs groups of"),
        (Spec("int4", (2, 64)), (16, 64), "needs groups of"),
        (Spec("int4", (WHOLE, WHOLE)), (1, 64), "needs groups of"),
        (Spec("int4", (2, 1, 64)), (2, 16, 64), "needs groups of"),
        (Spec("int4", (1, WHOLE, 64)), (2, 1, 64), "needs groups of"),
        (Spec("int4", (1, 64)), (2, 2, 16, 64), "2 or 3 dimensions"),
    ],
)
def test_what_does_not_fit(spec, shape, words):
    layout = registry.layouts.get("plane16")
    assert words in layout.refuses(spec, shape, registry.dtypes.get(spec.dtype))


def test_whole_bytes_only():
    layout = registry.layouts.get("plane16_bytes")
    spec = Spec("int4", (1, 64))
    assert "int4 has 4" in layout.refuses(spec, (16, 64), registry.dtypes.get("int4"))


def test_without_a_device_the_reason_is_a_sentence():
    reason = LINEAR.unavailable()
    assert reason is not None
    assert len(reason.split()) >= 3


def test_reasons(monkeypatch):
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert "Triton is not installed" in device.unavailable()
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.unavailable() == "no CUDA device is available"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert device.unavailable() == "needs sm_80, found sm_75"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert device.unavailable() is None


@pytest.fixture
def devices():
    """Those that the test makes up: what is known of them does not outlive it."""
    asked = (device.capability, device.sm_count, device.shared_memory, device.supports_pdl)
    for each in asked:
        each.cache_clear()
    yield
    for each in asked:
        each.cache_clear()


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("found", "driver", "early"),
    [((9, 0), 12030, True), ((9, 0), 12020, False), ((8, 9), 13000, False), ((10, 0), 13000, True)],
)
def test_who_starts_early(monkeypatch, found, driver, early):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    assert device.supports_pdl(torch.device("cuda", 0)) is early
    assert device.supports_pdl(torch.device("cpu")) is False


@pytest.mark.usefixtures("devices")
def test_each_device_is_asked_once(monkeypatch):
    asked = []

    def properties(device):
        asked.append(device.index)
        return SimpleNamespace(multi_processor_count=100 + device.index)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    found = [device.sm_count(torch.device("cuda", index)) for index in (0, 1, 0, 1)]
    assert (found, asked) == ([100, 101, 100, 101], [0, 1])


def test_calls_that_are_refused():
    assert LINEAR.refuses(call()) is None
    assert LINEAR.refuses(call(x_shape=(0, 512))) is None
    assert LINEAR.refuses(call(x_shape=(2, 128, 512))) is None
    assert "float32" in LINEAR.refuses(call(x_dtype=torch.float32))
    assert "found 513" in LINEAR.refuses(call(x_shape=(513, 512)))
    asymmetric = Spec("uint4", (1, 128), "bfloat16", "int", layout="plane16")
    assert "found 129" in LINEAR.refuses(call(spec=asymmetric, x_shape=(129, 512)))


def test_lookups():
    kernel = registry.kernels.get("triton_plane16_embedding")
    assert kernel.refuses(call(op="embedding", x_shape=(3,), x_dtype=torch.int64)) is None
    assert "int16" in kernel.refuses(call(op="embedding", x_shape=(3,), x_dtype=torch.int16))


def test_on_other_devices_weights_stay_as_they_are():
    q = quantize_tensor(gaussian((256, 512)).bfloat16(), Spec("int4", (1, 128), layout="packed"))
    assert repack(q).spec.layout != "plane16"


@pytest.mark.parametrize(
    ("n", "k", "m", "splits"),
    [
        (4096, 4096, 1, 8),  # o: 32 tiles, two of K for each of 256 CTAs
        (4096, 14336, 1, 8),  # down: 256 CTAs too
        (28672, 4096, 1, 1),  # gate and up: 224 tiles are enough
        (6144, 4096, 1, 4),
        (1024, 512, 1, 1),
        (4096, 4096, 64, 4),  # of 8 warps
        (4096, 4096, 512, 1),
    ],
)
def test_splits(n, k, m, splits):
    """Two CTAs of 4 warps, or one of 8, for an SM; no split is empty."""
    fmt = known(registry.dtypes.get("int4"))
    tiles = tiling(n, k, 128, fmt)
    assert launch.launch_config_of(tiles, m, 132).splits == splits
    for k_tiles in range(1, 60):
        found = splits_of(16, k_tiles, 4, 132)
        assert -(-k_tiles // -(-k_tiles // found)) == found


def test_tiles():
    found = [launch.tile_config_of(m)[:2] for m in (1, 16, 17, 32, 33, 64, 65, 512)]
    assert found == [(16, 4)] * 2 + [(32, 8)] * 2 + [(64, 8)] * 2 + [(128, 8)] * 2
    assert launch.tile_config_of(32).block_n == 256
    assert launch.tile_config_of(512, zero_point=True).block_m == 64


def test_a_table_begins_where_16_bytes_are_loaded_at_once():
    """Also that of two values, whose bits take 8: the address of a load of 16 would kill the context."""
    for dtype in [
        *(dtype for _, dtype in registry.dtypes.items()),
        lut_dtype("two", (-1.0, 1.0)),
    ]:
        fmt = format_of(replace(dtype, kind="lut") if dtype.kind == "codebook" else dtype)
        if isinstance(fmt, str) or not fmt.is_lut:
            continue
        table = fmt.table()
        assert fmt.lut_start % 4 == 0
        assert len(table) == fmt.lut_start + 32
        assert table[: len(fmt.values)].view(torch.float32).tolist() == list(fmt.values)


def test_explain_says_how_it_is_launched(monkeypatch):
    monkeypatch.setattr(samples, "current_device", lambda: torch.device("cpu"))
    assert LINEAR.describe(call(weight_shape=(4096, 4096), x_shape=(1, 4096))) == (
        "tiles of 16 rows × 128, split-K 8, 4 stages, sums in float32"
    )
