"""Random calls of the C++ ops, most of them wrong: `python fuzz_ops.py --calls 100000 [--seed 1]`.

Each call has valid arguments at first, of which up to two are then spoiled. It must either succeed
or raise an error whose text begins with the name of an argument; a crash is what the sanitizers are
for, under which the library is run with AO_CPU_LIBRARY. Call i depends on the seed and i alone:
`--first i --calls 1` makes it again, and `--trace` tells each call before it is made.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ao_core.numerics import packed_size
from ao_core.registry import registry
from ao_kernels.cpu.formats import Format, format_of
from ao_kernels.cpu.library import load

Arguments = dict[str, Any]
Random = random.Random

ELEMENTS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (*ELEMENTS, torch.float8_e8m0fnu, torch.float8_e4m3fn)
ZEROS = (*ELEMENTS, torch.uint8)
DTYPES = (
    *SCALES, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float64, torch.bool,
    torch.complex64, torch.float8_e5m2, torch.uint16,
)  # fmt: skip
#: what `adam_step` is told of each moment's format
STATE = ("table", "steps", "order", "nan", "reach")
NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 8, 255, 2**31, 2**40, 2**62, 2**63 - 1)
#: what the dispatcher and the allocator of torch say by themselves
NOT_OURS = re.compile(
    r"ao_kernels::|Could not run|not enough memory|Storage size calculation overflowed|must match"
    r"|numel: integer multiplication overflow|tried to allocate|meta tensor|memory format"
)


# -- valid arguments -------------------------------------------------------------------------------


def bits_of(rng: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bit patterns, NaN among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.frombuffer(bytearray(rng.randbytes(size) or b"\0"), dtype=torch.uint8)[:size]
    return data.view(dtype).reshape(shape)


def tile_sizes(rng: Random) -> Arguments:
    n, k = rng.randint(1, 40), rng.choice([rng.randint(1, 80), rng.randint(250, 600)])
    group = rng.choice([k, rng.randint(1, k), min(k, 32)])
    return {"n": n, "k": k, "bits": rng.randint(1, 8), "group": group}


def tile_shape(n: int, k: int, bits: int, group: int) -> tuple[int, int, int]:
    last = k - (k - 1) // group * group
    return -(-n // 16), (k - 1) // group * -(-group // 16) + -(-last // 16), 32 * bits


def tile_parts(rng: Random, sizes: Arguments, lead: tuple[int, ...] = ()) -> Arguments:
    """The parts that decoding needs, of random bits."""
    grid = (*lead, -(-sizes["n"] // 16), -(-sizes["k"] // sizes["group"]), 16)
    scale, outer = rng.choice(SCALES), (*lead, 1)
    return {
        "qdata": bits_of(rng, (*lead, *tile_shape(**sizes)), torch.uint8),
        "scale": bits_of(rng, grid, scale),
        "outer": rng.choice([None, bits_of(rng, outer, torch.float32)]),
        "zero": rng.choice([None, bits_of(rng, grid, rng.choice(ZEROS))]),
        "table": bits_of(rng, (1 << sizes["bits"],), torch.float32),
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
        **product(rng, sizes, parts),
        "x": bits_of(rng, (*rng.choice([(), (3,), (2, 9)]), sizes["k"]), dtype),
        "bias": rng.choice([None, bits_of(rng, (sizes["n"],), dtype)]),
    }


def grouped_linear(rng: Random) -> Arguments:
    sizes, experts = tile_sizes(rng), rng.randint(1, 3)
    ends = sorted(rng.randint(0, 7) for _ in range(experts))
    x = bits_of(rng, (7, sizes["k"]), rng.choice(ELEMENTS))
    return {
        **product(rng, sizes, tile_parts(rng, sizes, (experts,))),
        "x": x,
        "offs": torch.tensor(ends, dtype=torch.int32),
    }


def product(rng: Random, sizes: Arguments, parts: Arguments) -> Arguments:
    """What both products have in common; some tables are of integers."""
    kind, act = 0, rng.choice([0, 0, 3, 4])
    codes = parts["table"].numel()
    if rng.random() < 0.5:
        kind, act = 1, rng.randint(0, 4)
        least = rng.choice([0, -codes // 2])
        parts["table"] = torch.arange(codes, dtype=torch.float32) + least
    elif parts["zero"] is not None and parts["zero"].dtype == torch.uint8:
        parts["zero"] = None
    if parts["zero"] is not None and parts["zero"].dtype == torch.uint8:
        parts["zero"] &= codes - 1
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
        "reach": rng.uniform(0.5, 500),
        "zero": rng.choice([0, 2, 3] if fmt.rule != 1 else [0, 1, 2]),
        "scale_dtype": rng.choice(SCALES),
        "mx_mode": rng.randint(0, 3),
        "pack": rng.random() < 0.5,
    }


def encode(rng: Random) -> Arguments:
    matrices, sizes = blocks(rng)
    grid = grid_of(matrices, **sizes)
    return {
        "x": bits_of(rng, (matrices, sizes["n"], sizes["k"]), rng.choice(ELEMENTS)),
        "scale": bits_of(rng, grid, rng.choice(SCALES)),
        "zero": rng.choice([None, bits_of(rng, grid, rng.choice(ZEROS))]),
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
        "zero": rng.choice([None, bits_of(rng, grid, rng.choice(ZEROS))]),
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


def block_absmax(rng: Random) -> Arguments:
    matrices, sizes = blocks(rng)
    x = bits_of(rng, (matrices, sizes["n"], sizes["k"]), rng.choice(ELEMENTS))
    return {"x": x, **sizes}


def quantize_rows(rng: Random) -> Arguments:
    shape = (rng.randint(1, 5), rng.randint(1, 90))
    return {"x": bits_of(rng, shape, rng.choice(ELEMENTS)), "act": rng.randint(1, 4)}


def adam_step(rng: Random) -> Arguments:
    """A step for a few tensors of any bits."""
    sizes = [rng.choice([0, 1, 255, 300, 600]) for _ in range(rng.randint(1, 3))]
    dtype = rng.choice(ELEMENTS[:2])

    def of(dtype: torch.dtype, block: int = 1) -> list[Tensor]:
        return [bits_of(rng, (-(-size // block),), dtype) for size in sizes]

    lists: Arguments = {"params": of(dtype), "grads": of(dtype)}
    states: Arguments = {}
    for name in ("m", "v"):
        lists |= {name: of(torch.uint8), f"{name}_scales": of(torch.float32, 256)}
        fmt = format_of(registry.dtypes.get(rng.choice(["f8e4m3", "f8e5m2", "int8", "uint8"])))
        assert isinstance(fmt, Format)
        state = (fmt.table, fmt.steps, fmt.order, fmt.nan_code, rng.uniform(0.5, 500))
        states |= {f"{name}_{key}": each for key, each in zip(STATE, state, strict=True)}
    return {
        **lists, **states, "lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1,
        "step": rng.randint(1, 9), "decoupled": rng.random() < 0.5, "maximize": rng.random() < 0.5,
        "seed": rng.choice([None, 5]),
    }  # fmt: skip


#: op -> valid arguments of it
OPS: dict[str, Callable[[Random], Arguments]] = {
    "pack_tiles": pack_tiles,
    "unpack_tiles": unpack_tiles,
    "dequantize_tiles": tiles,
    "embedding": embedding,
    "linear": linear,
    "grouped_linear": grouped_linear,
    "quantize": quantize,
    "block_absmax": block_absmax,
    "encode": encode,
    "dequantize": dequantize,
    "error_sums": error_sums,
    "quantize_rows": quantize_rows,
    "adam_step": adam_step,
}


# -- spoiled ones ----------------------------------------------------------------------------------


def spoil(rng: Random, value: Any) -> Any:
    """Another value in the place of a valid one; it may happen to be valid too."""
    if isinstance(value, Tensor):
        return spoil_tensor(rng, value)
    if isinstance(value, list):
        place = rng.randrange(len(value))
        return rng.choice(
            [value[1:], [*value[:place], spoil_tensor(rng, value[place]), *value[place + 1 :]]]
        )
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([*NUMBERS, value - 1, value + 1, 2 * value, value + 16])
    if isinstance(value, float):
        return rng.choice([0.0, -value, float("nan"), float("inf"), 1e300, 1e-300, 5e-324])
    if isinstance(value, torch.dtype):
        return rng.choice(DTYPES)
    return bits_of(rng, (rng.randint(0, 3),), rng.choice(DTYPES))  # where there was None


def spoil_tensor(rng: Random, value: Tensor) -> Any:
    shape, dtype = list(value.shape), value.dtype
    place = rng.randrange(len(shape)) if shape else 0
    match rng.randrange(9):
        case 0:
            dtype = rng.choice(DTYPES)
        case 1 if shape:
            shape[place] = max(0, shape[place] + rng.choice([-16, -1, 1, 16]))
        case 2 if shape:
            shape[place] = rng.choice([0, 1, 2 * shape[place]])
        case 3:
            shape.insert(place, rng.choice([0, 1, 2]))
        case 4 if shape:
            del shape[place]
        case 5:  # as valid as before
            return value.unsqueeze(-1).expand(*shape, 2).clone()[..., 0]
        case 6:
            return misaligned(value)
        case 7:
            return value[:1].expand(shape) if shape and shape[0] else value
        case _:
            return rng.choice(
                [None, value.to("meta"), value.to_sparse() if dtype == torch.float32 else None]
            )
    return bits_of(rng, tuple(shape), dtype)


def misaligned(value: Tensor) -> Tensor:
    """The same in memory that begins at an odd address."""
    size = value.numel() * value.element_size()
    if size == 0 or value.dtype == torch.bool:
        return value
    flat = torch.frombuffer(bytearray(size + 1), dtype=value.dtype, offset=1, count=value.numel())
    return flat.reshape(value.shape)


# -- calls -----------------------------------------------------------------------------------------


def told(arguments: Arguments) -> str:
    """The arguments in a line."""
    texts = [
        f"{name}={tuple(value.shape)} {value.dtype} {value.device}"
        if isinstance(value, Tensor)
        else f"{name}={value!r}"
        for name, value in arguments.items()
    ]
    return ", ".join(texts)


def call(name: str, rng: Random, trace: bool) -> str:
    """Make one call: "accepted" or "refused". Raises where the op does what it must not do."""
    arguments = OPS[name](rng)
    spoiled = rng.sample(sorted(arguments), rng.choice([0, 1, 1, 1, 2]))
    for argument in spoiled:
        arguments[argument] = spoil(rng, arguments[argument])
    if trace:
        sys.stderr.write(f"{name} {told(arguments)}\n")
    op = getattr(torch.ops.ao_kernels, name).default
    try:
        op(**arguments)
    except (RuntimeError, IndexError) as error:
        text = str(error)
        named = re.match(r"\w+", text)
        ours = named is not None and named[0] in arguments
        if not spoiled or not (ours or NOT_OURS.search(text) or foreign(arguments)):
            raise AssertionError(f"{name}({told(arguments)}): {text[:500]}") from error
        return "refused"
    except (TypeError, ValueError, ZeroDivisionError) as error:
        if not (foreign(arguments) or isinstance(error, TypeError)):
            raise AssertionError(f"{name}({told(arguments)}): {error!r}") from error
        return "refused"
    return "accepted"


def foreign(arguments: Arguments) -> bool:
    """Whether torch answers for the op: for tensors without values, or not of one piece of memory."""
    values = [
        each
        for value in arguments.values()
        for each in (value if isinstance(value, list) else [value])
    ]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return any(t.is_meta or t.layout != torch.strided for t in tensors)


def main() -> None:
    """Make the calls, count what became of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", nargs="*", choices=OPS, default=list(OPS))
    parser.add_argument("--trace", action="store_true", help="print every call before it is made")
    chosen = parser.parse_args()
    load()
    counts: Counter[tuple[str, str]] = Counter()
    for i in range(chosen.first, chosen.first + chosen.calls):
        rng = Random(f"{chosen.seed} {i}")
        name = rng.choice(chosen.ops)
        try:
            counts[name, call(name, rng, chosen.trace)] += 1
        except AssertionError as error:
            sys.exit(f"call {i} of seed {chosen.seed}: {error}")
    for name in chosen.ops:
        accepted, refused = counts[name, "accepted"], counts[name, "refused"]
        sys.stdout.write(f"{name}: {accepted} accepted, {refused} refused\n")


if __name__ == "__main__":
    main()
