"""Attention over quantized keys and values: the call type of the op "attend", and what calls it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ao_core.arguments import check_fields, shown
from ao_core.dispatch import PIN, name_kernel, select
from ao_core.errors import ConfigError, UnsupportedOp
from ao_core.records import Kernel
from ao_core.registry import registry
from ao_core.spec import Spec
from ao_core.tensor.leaves import Leaves
from ao_core.tensor.qtensor import QTensor

__all__ = ["NO_GRADIENT", "AttendCall", "Attention", "attend", "attend_call"]

#: what is said where a gradient is wanted
NO_GRADIENT = (
    "attend over a quantized cache has no gradient; train with the attention of the model, without the "
    "cache, or generate under torch.no_grad()"
)

#: the tails, `center`, `start`, `stop` and `sinks`
_Others = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: where keys keep the kernels of calls with certain values, among what tensors remember
_KERNELS = "ao_core.attend"
#: calls of so many forms are remembered
_MOST_FORMS = 64


@dataclass(frozen=True)
class Attention:
    """Which tokens a query sees, and how its weights follow from its logits."""

    #: factor of q·k
    scale: float
    #: the queries are the last tokens, and each sees those up to itself; else each sees all
    causal: bool = True
    #: with `causal`: how many tokens a query sees at most, itself included; 0: all
    window: int = 0
    #: logits become softcap · tanh(logit / softcap); 0: they stay
    softcap: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.window < 0 or (self.window and not self.causal):
            raise ConfigError(
                f"window={self.window} with causal={self.causal}: use a positive number of tokens and "
                "causal=True, or 0 for all tokens"
            )
        if not (math.isfinite(self.scale) and 0 <= self.softcap < math.inf):
            raise ConfigError(
                f"scale={self.scale}, softcap={self.softcap}: use finite numbers, and 0 for no softcap"
            )


@dataclass(frozen=True)
class AttendCall:
    """A call of the op "attend"; an `OpCall`."""

    #: formats of keys and values
    key: Spec
    value: Spec
    #: (B, Hq, T, D)
    q_shape: tuple[int, ...]
    #: (B, Hkv, S, D); S is for how many tokens there is memory, not how many there are
    key_shape: tuple[int, ...]
    #: elements of a value
    value_dim: int
    #: slots of the tail; 0: there is none
    tail: int
    #: of queries, tail and result
    dtype: torch.dtype
    attention: Attention
    #: whether there is a `center`, a `start` or `stop`, and `sinks`
    centered: bool
    padded: bool
    sinks: bool
    device: str
    op: str = "attend"

    @property
    def layout(self) -> str:
        """That of the keys."""
        return self.key.layout

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The formats of keys and values."""
        return self.key, self.value


def attend(
    q: Tensor,
    key: QTensor | Leaves,
    value: QTensor | Leaves,
    counts: Tensor | None = None,
    *,
    tail_key: Tensor | None = None,
    tail_value: Tensor | None = None,
    center: Tensor | None = None,
    start: Tensor | None = None,
    stop: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of the last T tokens over a quantized cache: the op "attend", by the best kernel.

    Head h of the queries reads head h // (Hq / Hkv) of keys and values. Tokens before `counts[1]` are in
    `key` and `value`, those from there to `counts[0]` in the tail: token p is in its slot p % R. A query
    that sees no token gets 0. Memory that holds no token of these may hold anything. There is no gradient. In
    compiled code `key` and `value` are `Leaves`, made before; see `ao_core.ext.kernels`.

    Args:
        q: (B, Hq, T, D), float32, bfloat16, float16 or float64; the query i is token counts[0] − T + i.
        key: (B, Hkv, S, D), quantized; its logical dtype is that of q.
        value: (B, Hkv, S, Dv), likewise.
        counts: int64 (2,): how many tokens there are, and how many of them, the first ones, are in `key` and
            `value`. None: S and S.
        tail_key: (B, Hkv, R, D) in the dtype of q, the keys of tokens that are not quantized.
        tail_value: (B, Hkv, R, Dv), likewise.
        center: float32 (B, Hkv, 1, D), added to each key of `key`, and not to those of the tail.
        start: int64 (B,), the first token that queries of a row of the batch see: those before it are
            padding. None: 0.
        stop: int64 (B,), the token after the last that queries of a row see. None: counts[0].
        sinks: (Hq,), one more logit for each head, whose weight goes to no value: attention sinks as GPT-OSS
            has them. Not the first tokens of a text, which are tokens like others.
        scale: factor of q·k; None: 1 / √D.
        causal: each query sees no token after its own.
        window: how many tokens a query sees at most, itself included; 0: all.
        softcap: logits become softcap · tanh(logit / softcap); 0: they stay.

    Returns:
        (B, Hq, T, Dv) in the dtype of q, contiguous.

    Raises:
        ConfigError: shapes, dtypes or devices do not fit; Hq is not a multiple of Hkv; `counts` says more
            tokens than there is memory for, which only kernels that read it on the host can see.
        UnsupportedOp: no kernel serves the call.
    """
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.shape[-1], 1))
    if counts is None:
        counts = torch.full((2,), key.shape[2], dtype=torch.int64, device=q.device)
    if torch.compiler.is_compiling():
        from ao_core.tensor.attend_op import traced

        tensors = (counts, tail_key, tail_value, center, start, stop, sinks)
        return traced(q, key, value, tensors, (scale, causal, window, softcap))
    mode = _mode(float(scale), causal, window, float(softcap))
    keys, values = (x.tensor() if isinstance(x, Leaves) else x for x in (key, value))
    others = (tail_key, tail_value, center, start, stop, sinks)
    kernel = _kernel_of(q, keys, values, counts, others, mode)
    if not torch.is_grad_enabled():
        return _called(kernel, q, keys, values, counts, *others, mode)
    with torch.no_grad():
        out = _called(kernel, q, keys, values, counts, *others, mode)
    if q.requires_grad:
        out = _NoGradient.apply(out, q)  # type: ignore[no-untyped-call]
    return out


def _kernel_of(
    q: Tensor,
    keys: QTensor,
    values: QTensor,
    counts: Tensor,
    others: _Others,
    mode: Attention,
) -> Kernel:
    """The kernel of a call, which keys remember for calls of the same form with the same values.

    A step of generation asks for each layer: checks and the choice take longer than a short attention.
    """
    form = (
        *(None if x is None else (x.shape, x.dtype, x.device) for x in (q, counts, *others)),
        mode, registry.epoch, PIN.get(),
    )  # fmt: skip
    if not isinstance(keys, QTensor):
        return select(attend_call(q, keys, values, counts, *others, mode))  # which refuses it
    known: tuple[QTensor, dict[object, Kernel]] | None = keys._bound.get(_KERNELS)
    if known is None or known[0] is not values or len(known[1]) > _MOST_FORMS:
        known = keys._bound[_KERNELS] = (values, {})
    kernel = known[1].get(form)
    if kernel is None:
        kernel = select(attend_call(q, keys, values, counts, *others, mode))
        known[1][(*form[:-2], registry.epoch, PIN.get())] = kernel  # plugins may have been loaded
    return kernel


def _called(kernel: Kernel, *args: Any) -> Tensor:
    try:
        return kernel.fn(*args)  # type: ignore[no-any-return]
    except Exception as error:
        name_kernel(error, kernel)
        raise


class _NoGradient(torch.autograd.Function):
    """A result whose gradient is refused, and not silently missing."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise UnsupportedOp(NO_GRADIENT)


_mode = lru_cache(maxsize=256)(Attention)


def attend_call(
    q: Tensor,
    key: QTensor,
    value: QTensor,
    counts: Tensor,
    tail_key: Tensor | None,
    tail_value: Tensor | None,
    center: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    sinks: Tensor | None,
    attention: Attention,
) -> AttendCall:
    """The call of the op with these arguments, whose shapes, dtypes and devices are checked.

    Raises:
        ConfigError: they do not fit.
    """
    _check_operands(q, key, value)
    shape = tuple(key.shape)
    batch, heads, _, dim = shape
    slots = 0 if tail_key is None else tail_key.shape[2]
    if (tail_key is None) != (tail_value is None):
        raise ConfigError("tail_key and tail_value: pass both, or None for both")
    forms: tuple[tuple[str, Tensor | None, tuple[int, ...], torch.dtype | None], ...] = (
        ("counts", counts, (2,), torch.int64),
        ("tail_key", tail_key, (batch, heads, slots, dim), q.dtype),
        ("tail_value", tail_value, (batch, heads, slots, value.shape[3]), q.dtype),
        ("center", center, (batch, heads, 1, dim), torch.float32),
        ("start", start, (batch,), torch.int64),
        ("stop", stop, (batch,), torch.int64),
        ("sinks", sinks, (q.shape[1],), None),
    )
    for name, tensor, form, dtype in forms:
        if tensor is not None:
            _check_form(name, tensor, form, dtype or tensor.dtype, q.device)
    return AttendCall(
        key.spec,
        value.spec,
        tuple(q.shape),
        shape,
        value.shape[3],
        slots,
        q.dtype,
        attention,
        center is not None,
        start is not None or stop is not None,
        sinks is not None,
        q.device.type,
    )


def _check_form(
    name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tuple(x.shape) != shape or x.dtype != dtype or x.device != device:
        raise ConfigError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; with these queries and keys it must be "
            f"{dtype} {shape} on {device}"
        )


def _is_as_stored(x: object) -> bool:
    return isinstance(x, QTensor) and x.dim() == 4 and not x.is_permuted


def _check_operands(q: Tensor, key: QTensor, value: QTensor) -> None:
    if q.dim() != 4 or q.dtype not in _DTYPES:
        raise ConfigError(
            f"q={shown(q)} is {q.dtype} of {q.dim()} dimensions; use (B, Hq, T, D) in float32, bfloat16, "
            "float16 or float64"
        )
    for name, x in (("key", key), ("value", value)):
        if not _is_as_stored(x):
            raise ConfigError(
                f"{name}={shown(x)}: use a QTensor of (B, Hkv, S, D) whose dimensions are as they were "
                "quantized"
            )
        if x.spec.act is not None:
            raise ConfigError(
                f"{name} is {x.spec}: the queries of attention are not quantized; use a format whose act "
                "is None"
            )
        if x.dtype != q.dtype:
            raise ConfigError(
                f"{name} has the logical dtype {x.dtype}, and q is {q.dtype}; a cache serves one dtype: "
                "make another cache, or cast the queries"
            )
        if x.device != q.device:
            raise ConfigError(f"{name} is on {x.device}, and q on {q.device}; move one of them")
    if key.shape[:3] != value.shape[:3]:
        raise ConfigError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must agree in all but the last dimension"
        )
    if q.shape[0] != key.shape[0]:
        raise ConfigError(
            f"q has a batch of {q.shape[0]}, and key one of {key.shape[0]}; use the same, e.g. by selecting "
            "or repeating rows of the cache"
        )
    if q.shape[3] != key.shape[3]:
        raise ConfigError(
            f"q has heads of {q.shape[3]} elements, and key of {key.shape[3]}; use the same"
        )
    if key.shape[1] == 0 or q.shape[1] % key.shape[1]:
        raise ConfigError(
            f"q has {q.shape[1]} heads, which the {key.shape[1]} heads of key do not divide; each head of "
            "keys serves the same number of heads of queries"
        )
