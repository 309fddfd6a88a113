"""State dicts of modules with `ComputeWeight`s: plain tensors go out, and what computes comes back."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ao_core.compute.matmuls import Matmuls
from ao_core.compute.weight import ComputeWeight
from ao_core.tensor.qtensor import QTensor
from ao_core.tensor.sharding import local_shard, shard_like

__all__ = ["HIGH_PRECISION", "keep_state_plain"]

#: entry of the metadata that a state dict has for a module: names of its parameters whose matmuls were
#: put back to high precision
HIGH_PRECISION = "ao_high_precision"


def keep_state_plain(module: nn.Module) -> None:
    """Let the state dict of a module hold the memory of its `ComputeWeight`s, as plain tensors.

    So that whatever writes it, safetensors above all, finds ordinary memory, and so that it loads into
    the unconverted model. Loading with ``assign=True`` puts new memory under the matmuls that the
    module computes. A second call changes nothing.
    """
    if _plain not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_plain)
        module.register_load_state_dict_pre_hook(_computing)


def _plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Hook: memory in place of what computes; parameters themselves (`keep_vars`) stay what they are."""
    back = []
    for name, parameter in module._parameters.items():
        weight, value = local_shard(parameter), state_dict.get(prefix + name)
        if not isinstance(weight, ComputeWeight):
            continue
        if not weight.matmuls.any_low:
            back.append(name)
        if isinstance(value, Tensor) and value is not parameter:
            state_dict[prefix + name] = _memory(value)
    if back:
        metadata[HIGH_PRECISION] = back


def _computing(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Hook: what is to be assigned computes as what it replaces; layers fall back as they were saved."""
    assigned = metadata.get("assign_to_params_buffers", False)
    back = metadata.get(HIGH_PRECISION, ())
    for name, parameter in module._parameters.items():
        weight, key = local_shard(parameter), prefix + name
        if not isinstance(weight, ComputeWeight):
            continue
        if name in back and weight.matmuls.any_low:
            if weight.gather_state.gathers_codes:
                errors.append(
                    f"{key} was in high precision when it was saved, and FSDP2 has gathered its codes "
                    "here already; load before the first forward pass"
                )
                continue
            weight.matmuls = Matmuls()
        if assigned and isinstance(state_dict.get(key), Tensor):
            state_dict[key] = _around(state_dict[key], weight)


def _memory(value: Tensor) -> Tensor:
    """What a weight, or each rank's shard of one, holds in high precision."""
    local = local_shard(value)
    if not isinstance(local, ComputeWeight) or isinstance(local.memory, QTensor):
        return value
    return shard_like(value, local.memory.detach())


def _around(value: Tensor, weight: ComputeWeight) -> Tensor:
    """The casts of `weight` around a plain tensor, or around each rank's shard of one."""
    local = local_shard(value)
    if type(local) not in (Tensor, nn.Parameter):
        return value
    return shard_like(value, weight.like(local.detach()))
