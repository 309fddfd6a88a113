"""Valid arguments of the steps of optimizers, at random."""

from __future__ import annotations

import torch
from fuzz_arguments import ELEMENTS, Arguments, Random, bits_of
from torch import Tensor

from ao_core.ext import registry
from ao_kernels.cpu.formats import Format, format_of

#: what a step is told of each moment's format
STATE = ("table", "steps", "order", "nan", "reach")


def adam_step(rng: Random) -> Arguments:
    """A step for a few tensors of any bits."""
    return {
        **_step(rng, ("m", "v")), "eps": 1e-8, "step": rng.randint(1, 9), "decoupled": rng.random() < 0.5,
    }  # fmt: skip


def lion_step(rng: Random) -> Arguments:
    """The same with one moment."""
    return _step(rng, ("m",))


def _step(rng: Random, moments: tuple[str, ...]) -> Arguments:
    sizes = [rng.choice([0, 1, 255, 300, 600]) for _ in range(rng.randint(1, 3))]
    dtype = rng.choice(ELEMENTS[:2])

    def of(dtype: torch.dtype, block: int = 1) -> list[Tensor]:
        return [bits_of(rng, (-(-size // block),), dtype) for size in sizes]

    lists: Arguments = {"params": of(dtype), "grads": of(dtype)}
    states: Arguments = {}
    for name in moments:
        lists |= {name: of(torch.uint8), f"{name}_scales": of(torch.float32, 256)}
        fmt = format_of(registry.dtypes.get(rng.choice(["f8e4m3", "f8e5m2", "int8", "uint8"])))
        assert isinstance(fmt, Format)
        state = (fmt.table, fmt.steps, fmt.order, fmt.nan_code, rng.uniform(0.5, 500))
        states |= {f"{name}_{key}": each for key, each in zip(STATE, state, strict=True)}
    return {
        **lists, **states, "lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1,
        "maximize": rng.random() < 0.5, "seed": rng.choice([None, 5]),
    }  # fmt: skip


def rule_step(rng: Random) -> Arguments:
    """Any program, and moments of every kind."""
    shapes = [(rng.randint(0, 20), rng.choice([1, 30, 131])) for _ in range(rng.randint(1, 3))]
    kinds = [rng.randint(0, 2) for _ in range(rng.randint(0, 3))]
    dtype = rng.choice(ELEMENTS)

    def of(dtype: torch.dtype, block: int = 1) -> list[Tensor]:
        return [bits_of(rng, (-(-rows * columns // block),), dtype) for rows, columns in shapes]

    found: Arguments = {
        "params": of(dtype), "grads": of(rng.choice(ELEMENTS)), "lost": rng.choice([[], of(dtype)]),
        "states": [], "kinds": kinds, "formats": [], "nans": [], "reaches": [], "seed": rng.choice([None, 5]),
    }  # fmt: skip
    for kind in kinds:
        if kind == 0:
            found["states"] += of(rng.choice(ELEMENTS))
            continue
        bits = rng.choice([4, 8]) if kind == 1 else 4
        if kind == 1:
            found["states"] += [*of(torch.uint8, 8 // bits), *of(torch.float32, 32 * bits)]
        else:
            sizes = [rows * -(-columns // 2) for rows, columns in shapes]
            found["states"] += [bits_of(rng, (size,), torch.uint8) for size in sizes]
            found["states"] += [bits_of(rng, (rows,), torch.float32) for rows, _ in shapes]
            found["states"] += [bits_of(rng, (columns,), torch.float32) for _, columns in shapes]
        fmt = format_of(
            registry.dtypes.get(rng.choice({4: ["int4", "nf4"], 8: ["f8e4m3", "uint8"]}[bits]))
        )
        assert isinstance(fmt, Format)
        found["formats"] += [fmt.table, fmt.steps, fmt.order]
        found["nans"].append(fmt.nan_code)
        found["reaches"].append(rng.uniform(0.5, 500))
    written = list(range(2 + len(kinds)))
    program = []
    if rng.random() < 0.5:  # a norm, on which no other one depends
        program, written = [16, 15, 1, 0, 0], [*written, 15]
    for _ in range(rng.randint(0, 20)):
        result = rng.randint(0, 15)
        program += [rng.randint(0, 15), result, *(rng.choice(written) for _ in range(3))]
        written.append(result)
    return {
        **found, "program": program, "numbers": [rng.gauss(0, 1) for _ in range(len(program) // 5)],
        "outputs": rng.sample(sorted(set(written)), 1 + len(kinds)),
    }  # fmt: skip


OPS = {"adam_step": adam_step, "lion_step": lion_step, "rule_step": rule_step}
