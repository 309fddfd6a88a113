"""What `update` gives to attention: keys or values that are in a cache, as a tensor that nobody made yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ao_core.ext import UnsupportedOp

if TYPE_CHECKING:
    from ao_hf.cache.layers import AoLayer
    from ao_quant.kv_cache import QuantizedKV

__all__ = ["Stored", "stored"]


class Stored:
    """The keys or the values (B, Hkv, S, D) of one layer.

    It has the shape, dtype and device of a tensor. The attention "ao_kv" takes the cache out of it. Whoever
    does anything else with it, as models do that look at keys before attention, gets dense values: each
    operation and each other attribute is that of `dense()`.
    """

    def __init__(self, layer: AoLayer, kv: QuantizedKV, part: int, made: dict[str, Any]) -> None:
        self.layer = layer
        self.kv = kv
        #: 0: keys, 1: values
        self.part = part
        self._made = made
        self.length = layer.length

    @property
    def shape(self) -> torch.Size:
        """(B, Hkv, S, D)."""
        batch, heads, _, width = (self.kv.key, self.kv.value)[self.part].shape
        return torch.Size((batch, heads, self.length, width))

    @property
    def dtype(self) -> torch.dtype:
        """That of the model."""
        return self.kv.dtype

    @property
    def device(self) -> torch.device:
        """Where the cache is."""
        return self.kv.device

    def dense(self) -> Tensor:
        """The dequantized values; made once for keys and values.

        Raises:
            UnsupportedOp: in compiled code, or after tokens were added to the cache or taken from it.
        """
        if torch.compiler.is_compiling():
            raise UnsupportedOp(
                "compiled code reads a quantized cache through the attention 'ao_kv' and without a mask of "
                "tokens × tokens; call model.set_attn_implementation('ao_kv'), or do not compile"
            )
        if self.length != self.layer.length:
            raise UnsupportedOp(
                f"these keys or values are of {self.length} tokens, and the cache now has "
                f"{self.layer.length}; take them from the cache again"
            )
        if "dense" not in self._made:
            self.layer.trial = None  # nobody will check it, and it holds the prompt
            self._made["dense"] = self.layer.dense(self.kv)
        both: tuple[Tensor, Tensor] = self._made["dense"]
        return both[self.part]

    def size(self, dim: int | None = None) -> Any:
        """As `Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As `Tensor.dim`."""
        return len(self.shape)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Any function of torch, of the dense values."""
        return func(*map(_dense, args), **{key: _dense(x) for key, x in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copies and pickles ask before there are any attributes
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Stored({'keys' if self.part == 0 else 'values'} {tuple(self.shape)}, {self.dtype})"


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Stored, *others: Any) -> Any:
        return getattr(self.dense(), name)(*map(_dense, others))

    return apply


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "matmul",
    "rmatmul",
    "neg",
):
    setattr(Stored, f"__{_name}__", _operator(f"__{_name}__"))


def _dense(x: Any) -> Any:
    if isinstance(x, Stored):
        return x.dense()
    return type(x)(map(_dense, x)) if type(x) in (list, tuple) else x


def stored(layer: AoLayer, kv: QuantizedKV) -> tuple[Stored, Stored]:
    """The keys and values of a layer."""
    made: dict[str, Any] = {}
    return Stored(layer, kv, 0, made), Stored(layer, kv, 1, made)
