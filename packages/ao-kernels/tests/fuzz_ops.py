"""Random calls of the C++ ops, most of them wrong: `python fuzz_ops.py --calls 100000 [--seed 1]`.

Each call has valid arguments at first, of which up to two are then spoiled. It must either succeed
or raise an error whose text begins with the name of an argument; a crash is what the sanitizers are
for, under which the library is run with AO_CPU_LIBRARY. Call i depends on the seed and i alone:
`--first i --calls 1` makes it again, and `--trace` tells each call before it is made.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# a folder of its own: beside this file lies one with the name of a library, `triton`
sys.path.insert(0, str(Path(__file__).parent / "fuzz"))
import fuzz_arguments
import fuzz_blocks
import fuzz_steps
from fuzz_arguments import SCALES, Arguments, Random, bits_of

from ao_kernels.cpu.library import load

#: op -> valid arguments of it
OPS = fuzz_arguments.OPS | fuzz_blocks.OPS | fuzz_steps.OPS

DTYPES = (
    *SCALES, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float64, torch.bool,
    torch.complex64, torch.float8_e5m2, torch.uint16,
)  # fmt: skip
NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 8, 255, 2**31, 2**40, 2**62, 2**63 - 1)
#: what the dispatcher and the allocator of torch say by themselves
NOT_OURS = re.compile(
    r"ao_kernels::|Could not run|not enough memory|Storage size calculation overflowed|must match"
    r"|numel: integer multiplication overflow|tried to allocate|meta tensor|memory format"
)


# -- spoiled ones ----------------------------------------------------------------------------------


def spoil(rng: Random, value: Any) -> Any:
    """Another value in the place of a valid one; it may happen to be valid too."""
    if isinstance(value, Tensor):
        return spoil_tensor(rng, value)
    if isinstance(value, list):
        if not value:
            return value
        place = rng.randrange(len(value))
        other = spoil(rng, value[place])
        return rng.choice([value[1:], [*value[:place], other, *value[place + 1 :]]])
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
    spoiled = rng.sample(sorted(arguments), min(rng.choice([0, 1, 1, 1, 2]), len(arguments)))
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
