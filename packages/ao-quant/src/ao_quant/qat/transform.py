"""The transform of `QATConfig`: to weights in training, and from them to stored ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ao_core import WHOLE, ComputeWeight, QTensor, Skip, Spec, Target
from ao_core.ext import ConfigError, WeightConfig, is_conv, is_transposed, registry
from ao_core.ext.compute import Matmuls, deployed, extra_tensors, fake_quantized, is_delayed
from ao_core.ext.kernels import local_shard
from ao_quant.configs.gguf import GGUFWeightOnlyConfig
from ao_quant.configs.qat import LoRAQATConfig, QATConfig
from ao_quant.qat.rules import CLIPPED, LORA, STRETCHED, gguf_rule

__all__ = ["apply_qat", "check_learned", "matmuls_of", "qat_head"]

#: a matmul of gradients with something else, in float8
_FLOAT8 = Spec("f8e4m3", (1, WHOLE), act=Spec("f8e5m2", (1, WHOLE)))
#: `QATConfig.scales` -> the name of a fake-quantize rule
_RULES = {
    "chosen": "straight_through",
    "learned": "learned_scale",
    "stretched": STRETCHED.name,
    "clipped": CLIPPED.name,
}


def apply_qat(dense: Tensor, config: QATConfig | LoRAQATConfig, target: Target) -> Tensor | Skip:
    """`Transform.apply`: the weight in training, or what it has become.

    Raises:
        ConfigError: the weight cannot be converted: by another base than it was prepared for, while training
            still waits for its delay, or with a learned scale that is not positive.
    """
    matmuls = matmuls_of(dense, config, target)
    if isinstance(matmuls, Skip):
        return matmuls
    if config.step == "prepare":
        return ComputeWeight(dense, *matmuls)
    return _converted(matmuls, config, target)


def qat_head(config: QATConfig | LoRAQATConfig) -> QATConfig | LoRAQATConfig | None:
    """The same for what a head gets in place of the base."""
    wider = registry.transform_for(type(config.base)).for_head(config.base)
    return None if wider is None else replace(config, base=wider)


def matmuls_of(dense: Tensor, config: QATConfig | LoRAQATConfig, target: Target) -> Matmuls | Skip:
    """How a weight in training is rounded: as the base stores this one."""
    base: WeightConfig = config.weights
    new = registry.transform_for(type(base)).apply(dense, base, target)
    if isinstance(new, Skip):
        return new
    assert isinstance(new, QTensor)
    if new.spec.act is not None and dense.dim() != 2:
        return Skip(
            f"a weight of {dense.dim()} dimensions, and training rounds activations of linear layers only; "
            f"{base.weight_only!r} would round this weight"
        )
    if new.spec.input:
        return Skip(
            f"{new.spec}: weights of this format are stored after steps on their inputs, which weights in "
            "training have not"
        )
    fmt = base.weight_format(dense.dtype)
    options: dict[str, Any] = {
        "scale_method": fmt.scale_method if fmt.scale_method != "absmax" else None,
        "act_scale": fmt.act_scale,
        "act_zero_point": fmt.act_zero_point,
        "filters": is_conv(dense, target) or None,
        "in_out": is_transposed(target) or None,
    }
    if isinstance(config, LoRAQATConfig):
        rule = LORA[config.mode].name
        options |= {"rank": config.rank, "alpha": float(config.alpha)}
    else:
        rule = _RULES[config.scales]
    if isinstance(base, GGUFWeightOnlyConfig):
        if rule != _RULES["chosen"]:
            return Skip("scales of a GGUF type are found by its own search; use scales='chosen'")
        rule = gguf_rule(base.type)
    given = {name: value for name, value in options.items() if value is not None}
    matmuls = fake_quantized(new.spec, rule, new.spec.act, **given)
    if isinstance(config, QATConfig) and config.backward == "float8":
        if not isinstance(target.module, nn.Linear):
            return Skip(f"backward='float8' is for nn.Linear, not {type(target.module).__name__}")
        matmuls = matmuls._replace(grad_input=_FLOAT8, grad_weight=_FLOAT8)
    return matmuls


def _converted(
    matmuls: Matmuls, config: QATConfig | LoRAQATConfig, target: Target
) -> Tensor | Skip:
    weight = local_shard(getattr(target.module, target.name))
    if not isinstance(weight, ComputeWeight) or weight.matmuls.output is None:
        return Skip("it was not prepared: call quantize_ with step='prepare' before the training")
    if is_delayed(weight):
        raise ConfigError(
            f"{target.fqn}: it was never rounded in training, since a Delay that was set has not ended; call "
            "its step(), or quantize_ with the base itself"
        )
    if weight.matmuls.output != matmuls.output:
        raise ConfigError(
            f"{target.fqn}: base={config.base} is not what it was prepared for ({weight.matmuls.text()}); "
            "convert with the configuration that prepared it"
        )
    extras = {name: extra.detach() for name, extra in extra_tensors(target.module).items()}
    for name, extra in extras.items():
        check_learned(target.fqn, name, extra, weight.matmuls.output)
    return deployed(weight, extras)


def check_learned(fqn: str, name: str, extra: Tensor, spec: Spec) -> None:
    """Raise `ConfigError` if a learned extra tensor of a weight of this format cannot be stored."""
    wrong, wanted = ~extra.isfinite(), "finite"
    if name == "scale" and spec.zero_point == "none":  # the sign turns that of codes
        wrong, wanted = wrong | (extra == 0), "finite and not 0"
    elif name not in ("offset", "a", "b"):
        wrong, wanted = wrong | (extra <= 0), "finite and positive"
    if not wrong.any():
        return
    least, greatest = (float(v) for v in extra.float().aminmax())
    raise ConfigError(
        f"{fqn}: its learned {_named(name)} go from {least:g} to {greatest:g}; they must be {wanted}, and "
        f"{int(wrong.sum())} of {wrong.numel()} are not: train with a lower learning rate for them"
        f"{', or clamp them now' if wanted != 'finite' else ''}"
    )


def _named(extra: str) -> str:
    if extra in ("a", "b"):
        return f"adapters {extra.upper()}"
    return "clipping factors" if extra.startswith("clip") else f"{extra}s"
