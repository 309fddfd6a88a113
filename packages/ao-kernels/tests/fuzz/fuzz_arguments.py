"""Valid arguments of the C++ ops, at random: what `fuzz_ops.py` begins with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ao_core.ext import registry
from ao_core.ext.numerics import packed_size
from ao_kernels.cpu.formats import Format, format_of

Arguments = dict[str, Any]
Random = random.Random

ELEMENTS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (*ELEMENTS, torch.float8_e8m0fnu, torch.float8_e4m3fn)
#: of weights in tiles
TILE_SCALES = (*SCALES, torch.uint8, torch.int8)
ZEROS = (*ELEMENTS, torch.uint8)


def bits_of(rng: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bit patterns, NaN among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.frombuffer(bytearray(rng.randbytes(size) or b"\0"), dtype=torch.uint8)[:size]
    return data.view(dtype).reshape(shape)


def tile_sizes(rng: Random) -> Arguments:
    n, k = rng.randint(1, 40), rng.choice([rng.randint(1, 80), rng.randint(250, 600)])
    group = rng.choice([k, rng.randint(1, k), min(k, 32)])
    return {"n": n, "k": k, "bits": rng.randint(1, 8), "group": group}


def span_of(rng: Random, sizes: Arguments) -> int:
    """Groups that share an outer scale."""
    groups = -(-sizes["k"] // sizes["group"])
    return rng.choice([groups, rng.randint(1, groups)])


def tile_shape(n: int, k: int, bits: int, group: int) -> tuple[int, int, int]:
    last = k - (k - 1) // group * group
    return -(-n // 16), (k - 1) // group * -(-group // 16) + -(-last // 16), 32 * bits


def tile_parts(rng: Random, sizes: Arguments, lead: tuple[int, ...] = ()) -> Arguments:
    """The parts that decoding needs, of random bits, and the span of groups."""
    blocks, groups = (*lead, -(-sizes["n"] // 16)), -(-sizes["k"] // sizes["group"])
    span = span_of(rng, sizes)
    grid, outer = (*blocks, groups, 16), (*blocks, -(-groups // span), 16)
    zero_point = rng.choice(["zero_point", "offset", ""])
    return {
        "qdata": bits_of(rng, (*lead, *tile_shape(**sizes)), torch.uint8),
        "scale": bits_of(rng, grid, rng.choice(TILE_SCALES)),
        "scale_outer": rng.choice([None, bits_of(rng, outer, rng.choice(SCALES))]),
        "zero_point": bits_of(rng, grid, rng.choice(ZEROS)) if zero_point == "zero_point" else None,
        "offset": bits_of(rng, grid, rng.choice(TILE_SCALES)) if zero_point == "offset" else None,
        "offset_outer": bits_of(rng, outer, rng.choice(SCALES)) if zero_point == "offset" else None,
        "table": bits_of(rng, (1 << sizes["bits"],), torch.float32),
        "span": span,
    }


def tiles(rng: Random) -> Arguments:
    """Arguments of dequantize_tiles."""
    sizes = tile_sizes(rng)
    parts = tile_parts(rng, sizes, rng.choice([(), (2,)]))
    return {**parts, **sizes, "dtype": rng.choice(ELEMENTS)}


def embedding(rng: Random) -> Arguments:
    sizes = tile_sizes(rng)
    count, dtype = rng.randint(0, 5), rng.choice([torch.int64, torch.int32])
    ids = torch.tensor([rng.randrange(sizes["n"]) for _ in range(count)], dtype=dtype)
    return {"ids": ids, **tile_parts(rng, sizes), **sizes, "dtype": rng.choice(ELEMENTS)}


def pack_tiles(rng: Random) -> Arguments:
    sizes = tile_sizes(rng)
    rows = (*rng.choice([(), (2,)]), sizes["n"], packed_size(sizes["k"], sizes["bits"]))
    flip = rng.randrange(1 << sizes["bits"])
    return {"packed": bits_of(rng, rows, torch.uint8), **sizes, "flip": flip}


def unpack_tiles(rng: Random) -> Arguments:
    sizes = tile_sizes(rng)
    shape = (*rng.choice([(), (2,)]), *tile_shape(**sizes))
    flip = rng.randrange(1 << sizes["bits"])
    return {"qdata": bits_of(rng, shape, torch.uint8), **sizes, "flip": flip}


def linear(rng: Random) -> Arguments:
    sizes = tile_sizes(rng)
    parts, dtype = tile_parts(rng, sizes), rng.choice(ELEMENTS)
    return {
        **matmul(rng, sizes, parts),
        "x": bits_of(rng, (*rng.choice([(), (3,), (2, 9)]), sizes["k"]), dtype),
        "bias": rng.choice([None, bits_of(rng, (sizes["n"],), dtype)]),
    }


def grouped_linear(rng: Random) -> Arguments:
    sizes, experts = tile_sizes(rng), rng.randint(1, 3)
    ends = sorted(rng.randint(0, 7) for _ in range(experts))
    x = bits_of(rng, (7, sizes["k"]), rng.choice(ELEMENTS))
    return {
        **matmul(rng, sizes, tile_parts(rng, sizes, (experts,))),
        "x": x,
        "offs": torch.tensor(ends, dtype=torch.int32),
    }


def matmul(rng: Random, sizes: Arguments, parts: Arguments) -> Arguments:
    """What both matmuls have in common; some tables are of integers."""
    kind, act = 0, rng.choice([0, 0, 3, 4])
    codes = parts["table"].numel()
    if rng.random() < 0.5:
        kind, act = 1, rng.randint(0, 4)
        least = rng.choice([0, -codes // 2])
        parts["table"] = torch.arange(codes, dtype=torch.float32) + least
    elif parts["zero_point"] is not None and parts["zero_point"].dtype == torch.uint8:
        parts["zero_point"] = None
    if parts["zero_point"] is not None and parts["zero_point"].dtype == torch.uint8:
        parts["zero_point"] &= codes - 1
    lead = parts["qdata"].shape[:-2]
    rowsum = bits_of(rng, (*lead[:-1], lead[-1] * 16), torch.float32)
    rest = {name: sizes[name] for name in ("n", "bits", "group")}
    return {**parts, "rowsum": rowsum if act == 2 else None, **rest, "kind": kind, "act": act}


def any_format(rng: Random) -> Format:
    found = format_of(rng.choice([dtype for dtype in registry.dtypes.values() if dtype.bits <= 8]))
    assert isinstance(found, Format)
    return found._replace(rule=0) if rng.random() < 0.3 else found


def blocks(rng: Random) -> tuple[int, Arguments]:
    """How many matrices, and their sizes."""
    n, k = rng.randint(1, 9), rng.choice([rng.randint(1, 90), rng.randint(1000, 1100)])
    block_n, block_k = rng.choice([1, 1, n, rng.randint(1, n)]), rng.choice([k, rng.randint(1, k)])
    return rng.randint(1, 2), {"n": n, "k": k, "block_n": block_n, "block_k": block_k}


def grid_of(matrices: int, n: int, k: int, block_n: int, block_k: int) -> tuple[int, int, int]:
    return matrices, -(-n // block_n), -(-k // block_k)


def quantize(rng: Random) -> Arguments:
    matrices, sizes = blocks(rng)
    fmt = any_format(rng)
    return {
        "x": bits_of(rng, (matrices, sizes["n"], sizes["k"]), rng.choice(ELEMENTS)),
        **fmt._asdict(),
        **sizes,
        "quant_max": rng.uniform(0.5, 500),
        "zero_point": rng.choice([0, 2, 3] if fmt.rule != 1 else [0, 1, 2]),
        "scale_dtype": rng.choice(SCALES),
        "mx_mode": rng.randint(0, 3),
        "pack": rng.random() < 0.5,
    }


def fake_quantize(rng: Random) -> Arguments:
    return {name: value for name, value in quantize(rng).items() if name != "pack"}


def encode(rng: Random) -> Arguments:
    matrices, sizes = blocks(rng)
    grid = grid_of(matrices, **sizes)
    return {
        "x": bits_of(rng, (matrices, sizes["n"], sizes["k"]), rng.choice(ELEMENTS)),
        "scale": bits_of(rng, grid, rng.choice(SCALES)),
        "zero_point": rng.choice([None, bits_of(rng, grid, rng.choice(ZEROS))]),
        **any_format(rng)._asdict(),
        **sizes,
        "pack": rng.random() < 0.5,
    }


def dequantize(rng: Random) -> Arguments:
    matrices, sizes = blocks(rng)
    grid, fmt, packed = grid_of(matrices, **sizes), any_format(rng), rng.random() < 0.5
    row = packed_size(sizes["k"], (len(fmt.table) - 1).bit_length() if packed else 8)
    return {
        "codes": bits_of(rng, (matrices * sizes["n"], row), torch.uint8),
        "scale": bits_of(rng, grid, rng.choice(SCALES)),
        "zero_point": rng.choice([None, bits_of(rng, grid, rng.choice(ZEROS))]),
        "table": fmt.table,
        **sizes,
        "packed": packed,
        "dtype": rng.choice(ELEMENTS),
    }


def error_sums(rng: Random) -> Arguments:
    coded = dequantize(rng)
    shape = (coded["codes"].shape[0], coded["k"])
    x = bits_of(rng, rng.choice([shape, (shape[0] * shape[1],)]), rng.choice(ELEMENTS))
    return {"x": x, **coded, "step": rng.randint(1, 4)}


def scale_sums(rng: Random) -> Arguments:
    rows, columns = rng.randint(0, 9), rng.choice([rng.randint(0, 90), rng.randint(500, 520)])
    grid = (rows, rng.choice([rng.randint(0, 5), rng.randint(14, 40)]))
    return {
        "x": bits_of(rng, (rows, columns), rng.choice(ELEMENTS)),
        "scale": bits_of(rng, grid, torch.float32),
        "zero_point": rng.choice([None, bits_of(rng, grid, torch.float32)]),
        "importance": rng.choice([None, bits_of(rng, (rows, columns), torch.float32)]),
        "power": rng.choice([None, None, 0.7]),
        **any_format(rng)._asdict(),
    }


def search_scales(rng: Random) -> Arguments:
    rows, columns = rng.randint(0, 5), rng.choice([rng.randint(0, 90), rng.randint(500, 520)])
    point, counts = rng.randint(0, 3), [rng.randint(0, 20) for _ in range(rng.randint(0, 3))]
    column = (rows, 1)
    return {
        "x": bits_of(rng, (rows, columns), rng.choice(ELEMENTS)),
        "scale": bits_of(rng, column, torch.float32),
        "zero_point": bits_of(rng, column, torch.float32) if point else None,
        "importance": rng.choice([None, bits_of(rng, (rows, columns), torch.float32)]),
        "power": rng.choice([None, None, 0.7]),
        "gain": rng.choice([0.0, 10.0]),
        "factors": bits_of(rng, (2, sum(counts)), torch.float32),
        "stages": torch.tensor(counts, dtype=torch.int32),
        "fits": rng.randint(0, 3),
        "point": point,
        "scale_dtype": rng.choice(ELEMENTS),
        "point_dtype": rng.choice(ELEMENTS),
        "least": 2.0**-126,
        "greatest": rng.choice([65504.0, 3.4e38]),
        "greatest_point": rng.choice([65504.0, 3.4e38]),
        **any_format(rng)._asdict(),
    }


def learned_gradients(rng: Random) -> Arguments:
    shape = (rng.randint(0, 9), rng.choice([rng.randint(0, 90), rng.randint(500, 520)]))
    grid = (shape[0], 1)
    return {
        "x": bits_of(rng, shape, rng.choice(ELEMENTS)),
        "grad": bits_of(rng, shape, rng.choice(ELEMENTS)),
        "scale": bits_of(rng, grid, torch.float32),
        "zero_point": rng.choice([None, bits_of(rng, grid, torch.float32)]),
        "reach": rng.choice([0.0, 0.5, 1e30]),
        **any_format(rng)._asdict(),
    }


def block_absmax(rng: Random) -> Arguments:
    matrices, sizes = blocks(rng)
    x = bits_of(rng, (matrices, sizes["n"], sizes["k"]), rng.choice(ELEMENTS))
    return {"x": x, **sizes}


def quantize_rows(rng: Random) -> Arguments:
    shape = (rng.randint(1, 5), rng.randint(1, 90))
    return {"x": bits_of(rng, shape, rng.choice(ELEMENTS)), "act": rng.randint(1, 4)}


def block_sparse_linear(rng: Random) -> Arguments:
    """Some blocks of a weight, in any order of columns."""
    n, k, side = rng.randint(1, 70), rng.randint(1, 100), rng.choice([16, 32, 48])
    kept = torch.tensor(
        [[rng.random() < 0.5 for _ in range(0, k, side)] for _ in range(0, n, side)]
    )
    value, together = rng.choice(
        [(torch.float32, 1), (torch.float16, 1), (torch.bfloat16, 2), (torch.uint8, 4)]
    )
    coded, dtype = value == torch.uint8, rng.choice(ELEMENTS)
    crow = torch.cat([torch.zeros(1), kept.sum(1).cumsum(0)])
    scale = bits_of(rng, (rng.choice([1, n]),), rng.choice(ELEMENTS)) if coded else None
    return {
        "x": bits_of(rng, (*rng.choice([(), (3,), (2, 9)]), k), dtype),
        "qdata": bits_of(rng, (int(kept.sum()), side // together, side, together), value),
        "col_indices": kept.nonzero()[:, 1].to(torch.int32),
        "crow_indices": crow.to(torch.int32),
        "scale": scale,
        "bias": rng.choice([None, bits_of(rng, (n,), dtype)]),
        "n": n,
        "act": rng.randint(0, 1) if coded else 0,
    }


def two_four(rng: Random, value: torch.dtype, bits: int) -> Arguments:
    """Two codes of every four columns, with scales where they are integers."""
    n, k = rng.randint(1, 9), rng.choice([rng.randint(1, 150), rng.randint(500, 600)])
    fours, group = -(-k // 4), rng.choice([k, 32, 64])
    groups = -(-k // group)
    shapes = [(n, groups), (1, 1)] if groups == 1 else [(n, groups)]
    return {
        "qdata": bits_of(rng, (n, packed_size(2 * fours, bits)) if bits < 8 else (n, 2 * fours), value),
        "index": bits_of(rng, (n, -(-fours // 2)), torch.uint8),
        "scale": None if value.is_floating_point else bits_of(rng, rng.choice(shapes), rng.choice(ELEMENTS)),
        "k": k,
        "group": group,
    }  # fmt: skip


def two_four_linear(rng: Random) -> Arguments:
    value = rng.choice([*ELEMENTS, torch.int8, torch.uint8])
    weight, dtype = two_four(rng, value, 4 if value == torch.uint8 else 8), rng.choice(ELEMENTS)
    k, n = weight.pop("k"), weight["qdata"].shape[0]
    x = bits_of(rng, (*rng.choice([(), (3,), (2, 9)]), k), dtype)
    return {"x": x, **weight, "bias": rng.choice([None, bits_of(rng, (n,), dtype)])}


def two_four_dequantize(rng: Random) -> Arguments:
    value, bits = rng.choice(
        [*((element, 16) for element in ELEMENTS), (torch.uint8, 4), (torch.uint8, 8)]
    )
    table = bits_of(rng, (1 << bits,), torch.float32) if value == torch.uint8 else None
    return {**two_four(rng, value, bits), "table": table, "dtype": rng.choice(ELEMENTS)}


def two_four_mask(rng: Random) -> Arguments:
    shape = (rng.randint(0, 9), rng.choice([rng.randint(0, 20), rng.randint(60, 140)]))
    return {"x": bits_of(rng, shape, rng.choice(ELEMENTS))}


def hadamard(rng: Random) -> Arguments:
    """Blocks of powers of two, and of Paley's orders of fields of both kinds."""
    paley = rng.choice([(), (), (12,), (28,), (20, 12), (52,), (100,)])
    factors = [*paley, 1 << rng.randint(0, 8 - 2 * len(paley))]
    columns = math.prod(factors) * rng.randint(1, 3)
    x = bits_of(rng, (*rng.choice([(), (3,), (2, 9), (0,)]), columns), rng.choice(ELEMENTS))
    return {"x": x, "factors": factors, "inverse": rng.random() < 0.5}


#: op -> valid arguments of it
OPS: dict[str, Callable[[Random], Arguments]] = {
    "pack_tiles": pack_tiles,
    "unpack_tiles": unpack_tiles,
    "dequantize_tiles": tiles,
    "embedding": embedding,
    "linear": linear,
    "grouped_linear": grouped_linear,
    "quantize": quantize,
    "fake_quantize": fake_quantize,
    "block_absmax": block_absmax,
    "encode": encode,
    "dequantize": dequantize,
    "error_sums": error_sums,
    "quantize_rows": quantize_rows,
    "scale_sums": scale_sums,
    "search_scales": search_scales,
    "learned_gradients": learned_gradients,
    "hadamard": hadamard,
    "block_sparse_linear": block_sparse_linear,
    "two_four_linear": two_four_linear,
    "two_four_mask": two_four_mask,
    "two_four_dequantize": two_four_dequantize,
}
