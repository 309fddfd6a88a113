"""Blocks of a model taken out of it for a while, with something in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["Chain", "Enough", "Outputs", "flattened", "is_plain", "stubbed"]


class Enough(BaseException):
    """Ends a run of the model of which nothing more is needed."""


@dataclass(frozen=True)
class Chain:
    """The children of a ModuleList or Sequential, which are called one after the other."""

    #: of the container; empty where it is the model itself
    fqn: str
    container: nn.Module

    @property
    def blocks(self) -> list[nn.Module]:
        """The children, in order."""
        return list(self.container.children())

    @property
    def names(self) -> list[str]:
        """Their names in the model."""
        front = f"{self.fqn}." if self.fqn else ""
        return [f"{front}{name}" for name, _ in self.container.named_children()]

    def __str__(self) -> str:
        return self.fqn or f"the {type(self.container).__name__}"


@dataclass(frozen=True)
class Outputs:
    """What a block returns, without the values."""

    structure: Any
    #: shape, dtype and device of each tensor; None where there is none
    leaves: tuple[tuple[torch.Size, torch.dtype, torch.device] | None, ...]

    @classmethod
    def of(cls, returned: Any) -> Outputs:
        """Those of a value that a block returned."""
        leaves, structure = pytree.tree_flatten(returned)
        described = (
            (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else None
            for leaf in leaves
        )
        return cls(structure, tuple(described))

    def filled(self, leaves: list[Tensor | None]) -> Any:
        """The structure with these tensors."""
        return pytree.tree_unflatten(leaves, self.structure)

    def zeros(self) -> list[Tensor | None]:
        """Leaves that nobody reads the values of."""
        return [
            None if leaf is None else torch.zeros(leaf[0], dtype=leaf[1], device=leaf[2])
            for leaf in self.leaves
        ]

    def drawn(self, generator: torch.Generator) -> list[Tensor | None]:
        """Leaves of random values; zeros where they are no floating-point numbers."""
        found = self.zeros()
        for leaf in found:
            if leaf is not None and leaf.is_floating_point():
                leaf.copy_(torch.randn(leaf.shape, generator=generator, device="cpu"))
        return found


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of the arguments of a call, and their structure."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    return leaves, structure


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor without a class of its own."""
    return type(value) in (Tensor, nn.Parameter)


#: (number of the block, its arguments, those by keyword) -> what it returns
Act = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class _Stub(nn.Module):
    """Stands for a block: has its attributes, and does something else when it is called."""

    def __init__(self, block: nn.Module, act: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_ao_stub"] = (block, act)
        self.training = block.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_ao_stub"][1](args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_ao_stub"][0], name)


@contextmanager
def stubbed(chain: Chain, act: Act) -> Iterator[None]:
    """Within this context calls of the blocks go to `act`; the blocks are not in the model."""
    held = dict(chain.container._modules)
    try:
        for number, (name, block) in enumerate(held.items()):
            assert block is not None
            stub = _Stub(block, lambda args, kwargs, number=number: act(number, args, kwargs))
            chain.container._modules[name] = stub
        yield
    finally:
        chain.container._modules.update(held)
