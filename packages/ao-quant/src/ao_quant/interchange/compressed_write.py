"""Writing compressed-tensors: each weight in the format that has its values, and groups for config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ao_core import WHOLE, QTensor
from ao_core.ext.interchange import Written
from ao_quant.interchange import floats
from ao_quant.interchange.integers import integers_on
from ao_quant.interchange.words import pack_words

__all__ = ["config_of", "write_compressed"]

_FORMATS = {
    "fp8": "float-quantized",
    "mxfp8": "mxfp8-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}
_KINDS = {name: kind for kind, name in _FORMATS.items()}


def write_compressed(name: str, tensor: QTensor, settings: Mapping[str, Any]) -> Written:
    """The tensors of one module: of a format's own values, or packed integers."""
    chosen = str(settings.get("format") or _FORMATS.get(floats.kind_of(tensor), "pack-quantized"))
    owner = name.removesuffix(".weight")
    if chosen in _KINDS:
        return _floats(owner, tensor, chosen)
    # as vLLM takes them: scales in the dtype of the model
    own = tensor.dtype if tensor.dtype in (torch.float16, torch.bfloat16) else torch.float16
    scales = (own, torch.float16, torch.bfloat16, torch.float32)
    if chosen == "int-quantized":
        found = integers_on(tensor, (8,), scale=scales)
        tensors = {
            "weight": (found.codes ^ 128).view(torch.int8),
            "weight_scale": found.scale,
        }
        if found.zero is not None:
            tensors["weight_zero_point"] = (found.zero - 128).to(torch.int8)
    else:
        found = integers_on(tensor, tuple(range(1, 9)), scale=scales, permuted=True)
        codes, places = found.codes, torch.arange(tensor.shape[1])
        back = None if found.perm is None else found.perm.argsort()
        tensors = {
            "weight_packed": pack_words(codes if back is None else codes[:, back], found.bits),
            "weight_scale": found.scale,
            "weight_shape": torch.tensor(tensor.shape),
        }
        if found.zero is not None:
            along = found.zero.t().to(torch.uint8).contiguous()
            tensors["weight_zero_point"] = pack_words(along, found.bits).t().contiguous()
        if back is not None:
            tensors["weight_g_idx"] = (places // found.group)[back].to(torch.int32)
    whole = found.group >= tensor.shape[1]
    used = {
        "format": chosen,
        "num_bits": found.bits,
        "type": "int",
        "symmetric": found.zero is None,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else found.group,
        "actorder": None if found.perm is None else "group",
    }
    return Written({f"{owner}.{part}": each for part, each in tensors.items()}, used)


def _floats(owner: str, tensor: QTensor, chosen: str) -> Written:
    kind = _KINDS[chosen]
    base = floats.rounded(tensor, kind)
    scale: Any = base.scale
    block = base.spec.block
    used: dict[str, Any] = {
        "format": chosen,
        "num_bits": base.format.bits,
        "type": "float",
        "symmetric": True,
    }
    if kind == "fp8":
        grids = {(WHOLE, WHOLE): "tensor", (1, WHOLE): "channel"}
        strategy = grids.get((block[-2], block[-1]), "group" if block[-2] == 1 else "block")
        used |= {"strategy": strategy, "group_size": block[-1] if strategy == "group" else None}
        if strategy == "block":
            used["block_structure"] = list(block)
        stored = scale.reshape(1) if strategy == "tensor" else scale
        tensors = {"weight": base.qdata, "weight_scale": stored}
    elif kind == "nvfp4":
        used |= {"strategy": "tensor_group", "group_size": 16}
        tensors = {
            "weight_packed": base.qdata,
            "weight_scale": scale.qdata,
            "weight_global_scale": scale.scale.reciprocal().reshape(1),
        }
    else:
        used |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        part = "weight" if kind == "mxfp8" else "weight_packed"
        tensors = {part: base.qdata, "weight_scale": scale.view(torch.uint8)}
    return Written({f"{owner}.{part}": each for part, each in tensors.items()}, used)


def config_of(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    """One group for each kind of weight; the only one is that of all linear layers."""
    kinds: dict[str, list[str]] = {}
    for name, used in settings.items():
        kinds.setdefault(json.dumps(used, sort_keys=True), []).append(name.removesuffix(".weight"))
    groups = {}
    for number, (text, names) in enumerate(kinds.items()):
        used = {key: value for key, value in json.loads(text).items() if value is not None}
        chosen = used.pop("format")
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(kinds) == 1 else names,
            "weights": {"dynamic": False, **used},
            "input_activations": None,
            "output_activations": None,
            "format": chosen,
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(dense),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
