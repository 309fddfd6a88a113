"""How far an approximation is from its reference, summed in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ao_core.errors import ConfigError

__all__ = ["cosine", "error_sums", "relative_error", "sqnr", "sqnr_of_sums"]

#: elements widened to float64 at a time: few enough to stay in the cache
_CHUNK = 1 << 16


def sqnr(ref: Tensor, approx: Tensor) -> Tensor:
    """Signal to quantization noise in dB, 20 log10(|ref| / |ref - approx|); inf where equal."""
    return sqnr_of_sums(error_sums(ref, approx))


def relative_error(ref: Tensor, approx: Tensor) -> Tensor:
    """|ref - approx| / |ref| in the Euclidean norm; 0 where equal, inf where only `ref` is zero."""
    return _relative(error_sums(ref, approx))


def error_sums(ref: Tensor, approx: Tensor) -> Tensor:
    """The sums of ref² and of (ref - approx)², as float64 (2,)."""
    signal = noise = torch.zeros((), dtype=torch.float64, device=ref.device)
    for a, b in _chunks(ref, approx):
        error = a - b
        signal = signal + torch.dot(a, a)
        noise = noise + torch.dot(error, error)
    return torch.stack([signal, noise])


def sqnr_of_sums(sums: Tensor) -> Tensor:
    """`sqnr` from `error_sums`."""
    return -20.0 * torch.log10(_relative(sums))


def _relative(sums: Tensor) -> Tensor:
    signal, noise = sums.unbind()
    return torch.where(noise == 0, 0.0, noise / signal).sqrt()


def cosine(ref: Tensor, approx: Tensor) -> Tensor:
    """Cosine of the angle between two tensors as vectors; 1 where both are zero, 0 where one is."""
    aa = bb = ab = torch.zeros((), dtype=torch.float64, device=ref.device)
    for a, b in _chunks(ref, approx):
        aa = aa + torch.dot(a, a)
        bb = bb + torch.dot(b, b)
        ab = ab + torch.dot(a, b)
    one_is_zero = torch.where(aa == bb, 1.0, 0.0)
    return torch.where(aa * bb == 0, one_is_zero, ab / (aa.sqrt() * bb.sqrt()))


def _chunks(ref: Tensor, approx: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if ref.shape != approx.shape:
        raise ConfigError(
            f"approx has shape {tuple(approx.shape)}, ref {tuple(ref.shape)}: they must be equal"
        )
    a, b = ref.detach().reshape(-1), approx.detach().reshape(-1)
    for start in range(0, a.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        yield a[part].to(torch.float64), b[part].to(torch.float64)
