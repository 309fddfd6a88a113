"""Distillation: the model learns to predict what it predicted before it was quantized."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ao_core.ext import ConfigError

__all__ = ["qad_loss"]


def qad_loss(
    student: Tensor, teacher: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0
) -> Tensor:
    """The mean over positions of KL(teacher ‖ student), in nats: quantization-aware distillation.

    The teacher is the model as it was before, dense or in 8 bits. Unlike cross entropy the loss needs no
    labels, and its least value, 0, is where the two predict alike. (Xin et al. 2026, arXiv:2601.20088; the
    temperature is that of Hinton et al. 2015, arXiv:1503.02531, with their factor T².) Computed in float32 at
    least.

    Args:
        student: logits (…, V).
        teacher: logits of the same shape, to which no gradient flows.
        mask: (…), the positions that count, e.g. ``labels != -100``; None: all.
        temperature: by which logits are divided.

    Raises:
        ConfigError: shapes differ, or the temperature is not positive.
    """
    if student.shape != teacher.shape:
        raise ConfigError(
            f"teacher={tuple(teacher.shape)}: logits of the student are {tuple(student.shape)}; both must be "
            "of the same positions and vocabulary"
        )
    if mask is not None and mask.shape != student.shape[:-1]:
        raise ConfigError(
            f"mask={tuple(mask.shape)}: logits have positions {tuple(student.shape[:-1])}; use that shape"
        )
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature!r}: use a number above 0, such as 1.0")
    ours, theirs = (
        F.log_softmax((x.float() if x.dtype.itemsize < 4 else x) / temperature, dim=-1)
        for x in (student, teacher.detach())
    )
    each = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1) * temperature**2
    if mask is None:
        return each.mean()
    # a sum over none is 0, not 0 / 0
    return each.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)
