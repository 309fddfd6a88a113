"""AutoRound's own label: the tensors are those of GPTQ version 1 or of AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ao_core import QTensor
from ao_core.ext import CheckpointError
from ao_core.ext.interchange import Interchange, Reading, Source, Written
from ao_quant.interchange.awq import AWQ, gemm_modules
from ao_quant.interchange.gptq import GPTQ, gptq_modules, read_gptq, write_gptq
from ao_quant.interchange.naming import AUTOROUND, quantized_by

__all__ = ["AUTO_ROUND"]

_PACKINGS = (
    "auto_round:auto_gptq",
    "auto_round:auto_awq",
    "auto_round",
    "auto_round:gptq",
    "auto_round:awq",
)


def _read(source: Source) -> Reading:
    packing = source.quantization.get("packing_format", _PACKINGS[0])
    if packing not in _PACKINGS:
        raise CheckpointError(f"packing_format={packing!r} is not read; {', '.join(_PACKINGS)} are")
    gptq, awq = gptq_modules(source), gemm_modules(source)
    if gptq and awq:
        raise CheckpointError("some modules are packed as GPTQ does, and others as AWQ")
    return AWQ.read(source) if awq else read_gptq(source)


def _write(name: str, tensor: QTensor, settings: Mapping[str, Any]) -> Written:
    if settings.get("bits") and "version" not in settings:
        return AWQ.write(name, tensor, settings)
    return write_gptq(name, tensor, {"version": 1, **settings})


def _config(settings: Mapping[str, Mapping[str, Any]], dense: tuple[str, ...]) -> dict[str, Any]:
    keys = ("bits", "group_size", "sym")
    first = next(iter(settings.values()), {"bits": 4, "group_size": 128, "sym": True})
    shared = {key: first.get(key, True) for key in keys}
    others = {
        name.removesuffix(".weight"): {key: used.get(key, True) for key in keys}
        for name, used in settings.items()
        if any(used.get(key, True) != shared[key] for key in keys)
    }
    kept = {name: {"bits": 16, "act_bits": 16, "data_type": "float"} for name in dense}
    awq = first.get("version") == "gemm"
    return {
        **shared,
        "quant_method": AUTOROUND,
        "packing_format": "auto_round:auto_awq" if awq else "auto_round:auto_gptq",
        "data_type": "int",
        "act_bits": 16,
        "extra_config": {**others, **kept},
    }


def _detect(source: Source) -> str:
    found = len(gptq_modules(source)) + len(gemm_modules(source))
    if not quantized_by(source, AUTOROUND, "intel/auto-round") or not found:
        return ""
    return f"the label is AutoRound's, and {found} modules have qweight, qzeros and scales"


AUTO_ROUND = Interchange(
    "auto-round",
    _detect,
    _read,
    _write,
    _config,
    f"AutoRound: the tensors of {GPTQ.name} or {AWQ.name}",
)
