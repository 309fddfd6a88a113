"""State dicts: of shards as `DTensor`s, of torch's optimizers, of bitsandbytes'."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ao_core.ext import ConfigError, checked
from ao_core.ext.kernels import is_sharded, local_shard, shard_like
from ao_optim import bitsandbytes
from ao_optim.formats import dense, store

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ao_optim.optimizer import LowBitOptimizer

__all__ = ["STORAGE", "adopt", "check_form", "full_state", "packed", "prepare", "stored_anew"]

#: options that say how state is stored, which a checkpoint does not change
STORAGE = ("state_format", "min_quantized_numel", "rounding", "capturable")

#: options of torch's optimizers that say how to compute, not what
_HOW = ("foreach", "fused", "differentiable", "decoupled_weight_decay")


def check_form(state_dict: Any) -> None:
    """Raise `ConfigError` for what is not what `Optimizer.state_dict` returns, whatever it holds."""
    if not isinstance(state_dict, dict):
        raise ConfigError(f"state_dict is a {type(state_dict).__name__}, not a dict")
    groups = state_dict.get("param_groups")
    _check_groups(groups)
    _check_state(state_dict.get("state"))
    known = {key for group in groups or () for key in group["params"]}
    if others := [key for key in state_dict["state"] if key not in known]:
        raise ConfigError(f"state_dict: state has {others[0]!r}, which none of the groups has")


def packed(found: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A state dict whose moments of shards are `DTensor`s; its dicts may be written to."""
    params = dict(enumerate(chain.from_iterable(group["params"] for group in groups)))
    state = {
        key: {name: _portable(params[key], value) for name, value in each.items()}
        if key in params
        else each
        for key, each in found["state"].items()
    }
    return {**found, "state": state}


def _portable(param: Tensor, value: Any) -> Any:
    if not is_sharded(param) or not isinstance(value, Tensor) or not value.dim():
        return value
    return shard_like(param, dense(value))


@checked
def full_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of any optimizer, by number or by name, with its quantized moments in float32.

    It is what torch's own optimizer of the same rule loads, and what `torch.distributed.checkpoint`
    can save, or fill, where parameters are not sharded: quantized tensors cannot be cut anywhere.
    """
    _check_state(state_dict.get("state"))
    state = {
        key: {name: dense(value) for name, value in each.items()}
        for key, each in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def stored_anew(
    optimizer: LowBitOptimizer, held: dict[Tensor, Any], group: dict[str, Any]
) -> dict[Tensor, Any]:
    """The same states, as `optimizer` stores those of a group with these options."""
    return {
        param: _restored(optimizer, param, state, group, f"a parameter of {tuple(param.shape)}")
        for param, state in held.items()
    }


class _Ready:
    """State that torch is to take as it is, without casting it to the dtype of the parameter."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state


def prepare(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hook before loading: check the dict, and bring its state into this optimizer's formats."""
    low: LowBitOptimizer = optimizer  # type: ignore[assignment]
    saved = [_options(low, group) for group in state_dict["param_groups"]]
    ready = dict(state_dict["state"])
    for index, (old, group) in enumerate(zip(saved, low.param_groups, strict=False)):
        kept = {name: group[name] for name in STORAGE}
        merged = {**{k: v for k, v in group.items() if k != "params"}, **old, **kept}
        try:
            low.check_options(merged)
        except ValueError as error:
            raise ValueError(f"param_groups[{index}] of the state dict: {error}") from error
        saved[index] = merged
        for key, param in zip(old["params"], group["params"], strict=False):
            if key in ready:
                ready[key] = _Ready(_restored(low, param, ready[key], merged, f"parameter {key}"))
    return {**state_dict, "state": ready, "param_groups": saved}


def _check_groups(groups: Any) -> None:
    """Raise `ConfigError` where they are not the groups that `Optimizer.state_dict` returns."""
    if not isinstance(groups, list):
        raise ConfigError(f"state_dict: param_groups={groups!r:.80} is not a list of groups")
    for index, group in enumerate(groups):
        keys = group.get("params") if isinstance(group, dict) else None
        if not isinstance(keys, list) or not all(isinstance(key, (int, str)) for key in keys):
            raise ConfigError(
                f"state_dict: param_groups[{index}]={group!r:.80} is not a dict of options with a list "
                "'params' of the numbers or names of parameters"
            )


def _check_state(state: Any) -> None:
    """Raise `ConfigError` where it is not the state that `Optimizer.state_dict` returns."""
    if not isinstance(state, dict):
        raise ConfigError(f"state_dict: state={state!r:.80} is not a dict")
    for key, each in state.items():
        if not isinstance(each, dict):
            raise ConfigError(
                f"state_dict: state of parameter {key} is a {type(each).__name__}, not a dict of moments"
            )


def adopt(optimizer: Optimizer) -> None:
    """Hook after loading: unwrap what `prepare` made."""
    for param, ready in list(optimizer.state.items()):
        if isinstance(ready, _Ready):
            optimizer.state[param] = ready.state


def _options(optimizer: LowBitOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The options of a saved group, without those that mean nothing here."""
    if group.get("amsgrad"):
        raise ValueError(
            f"amsgrad=True: {type(optimizer).__name__} keeps no maximum of second moments; "
            "load a state that was made without it"
        )
    return {name: value for name, value in group.items() if name not in _HOW}


def _restored(
    optimizer: LowBitOptimizer,
    param: Tensor,
    saved: dict[str, Any],
    group: dict[str, Any],
    where: str,
) -> dict[str, Tensor]:
    part = local_shard(param)
    slots = optimizer.rule.slots(group)
    saved = bitsandbytes.unpacked(saved, slots, part)
    if not saved:
        return {}
    missing = [slot.name for slot in slots if slot.name not in saved]
    known = {"step", "compensation", *(slot.name for slot in slots)}
    surplus = sorted(
        name for name, v in saved.items() if name not in known and isinstance(v, Tensor)
    )
    if missing or surplus:
        raise ValueError(
            f"state of {where} holds {', '.join(map(str, saved))}: it is not that of "
            f"{type(optimizer).__name__}, which keeps {', '.join(s.name for s in slots) or 'nothing'}"
        )
    device = part.device if group["capturable"] else torch.device("cpu")
    step = _step_of(saved.get("step", 0.0), where)
    state = {"step": torch.tensor(step, dtype=torch.float32, device=device)}
    for slot in slots:
        value = _part_of(param, saved[slot.name], f"{slot.name} of {where}")
        state[slot.name] = store(value, optimizer.spec_of(part, group, slot.signed), part.device)
    if group["rounding"] == "kahan" and part.dtype != torch.float32:
        lost = saved.get("compensation")
        if lost is None:
            state["compensation"] = torch.zeros_like(part)
        else:
            kept = _part_of(param, lost, f"compensation of {where}")
            state["compensation"] = kept.to(part.device, part.dtype, copy=True)
    return state


def _step_of(value: Any, where: str) -> float:
    """The count of steps, checked."""
    try:
        step = float(value)
    except (TypeError, ValueError, RuntimeError):
        step = -1.0
    if not 0 <= step < float("inf"):
        raise ValueError(f"step of {where} is {value!r}; a count of steps is a number from 0 on")
    return step


def _part_of(param: Tensor, value: Any, where: str) -> Tensor:
    """This rank's part of a moment that is saved for a parameter of equal shape."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_sparse:
        kind = (
            f"{value.layout} of {value.dtype}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise ValueError(f"{where} is {kind}; a moment is a tensor of floating-point numbers")
    mine: Tensor = local_shard(value)
    part = local_shard(param)
    if tuple(mine.shape) != tuple(part.shape):
        raise ValueError(
            f"{where} has shape {tuple(mine.shape)}, but the parameter has {tuple(part.shape)}"
        )
    return mine
