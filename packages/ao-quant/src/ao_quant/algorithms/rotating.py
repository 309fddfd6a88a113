"""Rotations of a model's channels: R1 and R2 into its weights, R4 as input steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ao_core import Config, Prepared
from ao_core.ext import ChosenSteps, ConfigError, hadamard_step, is_conv
from ao_core.ext.calibration import Sample, operand
from ao_core.ext.graph import (
    ModelGraph,
    RotationSite,
    analyze,
    keeping_mean,
    names_of,
    rotated,
    sharing,
    tensors_of,
)
from ao_core.ext.numerics import hadamard_matrix, largest_block
from ao_core.ext.quantizing import Decision
from ao_quant.algorithms.channels import proven_all
from ao_quant.configs import AWQConfig, RotateConfig, SmoothQuantConfig

__all__ = ["misplaced_reason", "random_rotation", "rotate"]

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def misplaced_reason(config: RotateConfig, before: Sequence[Config]) -> str | None:
    """`ModelTransform.refuses`: what comes before rotations without sense."""
    for other in before:
        if isinstance(other, RotateConfig):
            return "the model is rotated already; once is enough"
        if isinstance(other, (AWQConfig, SmoothQuantConfig)):
            return (
                "rotated channels are mixtures of those that factors were found for, so none stands out; "
                "use one of the two"
            )
    return None


def rotate(
    model: nn.Module,
    weights: Sequence[Decision],
    batches: Sequence[Sample],
    config: RotateConfig,
) -> Prepared:
    """`ModelTransform.apply` of `RotateConfig`.

    Raises:
        GraphError: the model cannot be traced.
        ConfigError: there is nothing to rotate of what was asked for.
    """
    steps: dict[str, ChosenSteps] = {}
    notes: dict[str, str] = {}
    if config.residual or config.values or config.online == "needed":
        free, untied = _untied(model) if config.residual else (model, {})
        graph = analyze(free, batches[0])
        sites = [
            site
            for site in graph.rotation_sites
            if (config.residual if site.kind == "residual" else config.values)
        ]
        _check_found(sites, graph, config)
        changes = {}
        for place, site in enumerate(sites):
            generator = torch.Generator().manual_seed(config.seed * 1_000_003 + place)
            changes[site.name] = _rotation(site, config.block, generator)
        model, wrong = proven_all(free if sites else model, batches[0], changes, "rotation")
        if len(wrong) == len(sites) > 0:
            raise ConfigError(f"RotateConfig: {next(iter(wrong.values()))}")
        for site in sites:
            _note(notes, site, wrong.get(site.name))
        if any(site.kind == "residual" for site in sites):
            notes |= untied
        needed = {site.parameter for site in graph.online_sites}
    else:
        needed = set()
    for entry in _online(weights, needed, config):
        size = operand(entry.tensor, entry.owners[0]).shape[-1]
        block = largest_block(size if config.block is None else math.gcd(size, config.block))
        if block < 2:
            notes[entry.fqn] = f"not rotated: {size} channels have no blocks of a Hadamard matrix"
        else:
            steps[entry.fqn] = ChosenSteps((hadamard_step(block),))
            notes[entry.fqn] = "; ".join(
                filter(
                    None,
                    (notes.get(entry.fqn), f"its input is rotated online, in blocks of {block}"),
                )
            )
    if not steps and not notes:
        raise ConfigError("RotateConfig: no channels were found that could be rotated")
    return Prepared(model, steps, notes)


def _check_found(sites: Sequence[RotationSite], graph: ModelGraph, config: RotateConfig) -> None:
    if config.residual and not any(site.kind == "residual" for site in sites):
        why = "; ".join(graph.notes) or "nothing is added to a stream of channels"
        raise ConfigError(
            f"residual=True: no residual stream of the model can be rotated: {why}; use residual=False"
        )


def _note(notes: dict[str, str], site: RotationSite, wrong: str | None) -> None:
    """What happened to the parameters of a site."""
    what = {"residual": "the residual stream", "heads": "each head"}.get(site.kind, "channels")
    for each in (*site.writers, *site.readers):
        text = f"rotated with {what} of {site.size}"
        if wrong:
            text = f"not {text}: {wrong}"
        notes[each.parameter] = "; ".join(filter(None, (notes.get(each.parameter), text)))
    for fold in site.folds:
        if not wrong:
            notes[fold.parameter] = "its gains moved into what reads the norm"


def _untied(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """A copy in which what multiplies by an embedding has a weight of its own, and notes on that."""
    first = names_of(model)
    tensors = tensors_of(model)
    notes, copy = {}, sharing(model)
    for name, one in first.items():
        place, _, leaf = name.rpartition(".")
        module, other = copy.get_submodule(place), copy.get_submodule(one.rpartition(".")[0])
        if name != one and isinstance(other, _LOOKUPS) and not isinstance(module, _LOOKUPS):
            fresh = nn.Parameter(tensors[one].detach().clone(), requires_grad=False)
            setattr(module, leaf, fresh)
            notes[name] = (
                f"no longer tied to {one}, since the gains of a norm moved into it: a weight of its own"
            )
    return (copy, notes) if notes else (model, {})


def _rotation(
    site: RotationSite, block: int | None, generator: torch.Generator
) -> Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]:
    if site.keeps_mean:
        matrix = keeping_mean(random_rotation(site.size - 1, None, generator))
    else:
        matrix = random_rotation(site.size, block, generator)
    return lambda tensors: rotated(tensors, site, matrix)


def random_rotation(size: int, block: int | None, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix (size, size), float64, that spreads each channel over its block evenly.

    diag(±1) · H / √n with random signs. Where n has no Hadamard matrix it is the Kronecker product of a
    random orthogonal matrix and that of the largest divisor of n that has one.

    Args:
        size: n.
        block: elements of the blocks on the diagonal, those of `size` in any case; None: one block of all.
        generator: of the signs.
    """
    if block is not None and block < size:
        part = math.gcd(size, block)
        parts = [random_rotation(part, None, generator) for _ in range(size // part)]
        blocks: Tensor = torch.block_diag(*parts)
        return blocks
    inner = largest_block(size)
    matrix = hadamard_matrix(inner).double() / math.sqrt(inner)
    if inner < size:
        outer = torch.randn(size // inner, size // inner, dtype=torch.float64, generator=generator)
        matrix = torch.kron(torch.linalg.qr(outer)[0].contiguous(), matrix)
    signs = torch.randint(0, 2, (size,), generator=generator, dtype=torch.float64) * 2 - 1
    return signs[:, None] * matrix


def _online(weights: Sequence[Decision], needed: set[str], config: RotateConfig) -> list[Decision]:
    """The weights whose inputs are rotated while the model runs.

    Raises:
        ConfigError: a pattern matches none.
    """
    fit = [
        entry
        for entry in weights
        if entry.tensor.dim() in (2, 3)
        and not is_conv(entry.tensor, entry.owners[0])
        and not any(isinstance(owner.module, _LOOKUPS) for owner in entry.owners)
    ]
    if isinstance(config.online, str):
        chosen = {"needed": needed, "all": {entry.fqn for entry in fit}, "none": set[str]()}
        return [entry for entry in fit if entry.fqn in chosen[config.online]]
    found: dict[str, Decision] = {}
    for pattern in config.online:
        names = {
            entry.fqn: entry
            for entry in fit
            if fnmatchcase(entry.fqn, pattern) or fnmatchcase(entry.fqn.rpartition(".")[0], pattern)
        }
        if not names:
            raise ConfigError(
                f"online={config.online!r}: {pattern!r} matches no weight that is going to be quantized"
            )
        found |= names
    return list(found.values())
