"""Muon (Jordan et al. 2024): momentum of a matrix, made nearly orthogonal by Newton-Schulz iterations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ao_optim.rules.base import Options, Rule, Slot, State, check_least, check_lr, decay_weights

__all__ = ["MUON"]


def _orthogonal(matrix: Tensor, options: Options) -> Tensor:
    """A matrix of about the same singular vectors, and singular values near 1; in bfloat16.

    Source: https://kellerjordan.github.io/posts/muon
    """
    a, b, c = options["ns_coefficients"]
    x: Tensor = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=options["eps"])
    for _ in range(options["ns_steps"]):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def _update(param: Tensor, grad: Tensor, state: State, options: Options, step: Any) -> None:
    momentum = options["momentum"]
    velocity = state["momentum_buffer"].lerp_(grad, 1 - momentum)
    change = grad.lerp(velocity, momentum) if options["nesterov"] else velocity
    rows, columns = param.shape
    if options["adjust_lr_fn"] == "match_rms_adamw":
        factor = 0.2 * max(rows, columns) ** 0.5
    else:
        factor = max(1.0, rows / max(columns, 1)) ** 0.5
    decay_weights(param, options)
    param.sub_(_orthogonal(change, options).float() * (options["lr"] * factor))


def _slots(options: Options) -> tuple[Slot, ...]:
    return (Slot("momentum_buffer"),)


def _check(options: Options) -> None:
    check_lr(options)
    check_least(options, momentum="momentum value", weight_decay="weight_decay value")
    if options["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ValueError(
            f"Adjust learning rate function {options['adjust_lr_fn']} is not supported; "
            "use 'original' or 'match_rms_adamw'"
        )


MUON = Rule(
    "muon",
    {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
    },
    _slots,
    _update,
    _check,
    elementwise=False,
    only_matrices=True,
)
