"""What static scales of activations cost a model, next to dynamic ones: a table, row by row."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ao_core import Config, FqnToConfig, quantize_
from ao_quant import (
    Float8StaticActivationFloat8WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    OutlierWarning,
    SmoothQuantConfig,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "minilm"))
from minilm_demo.results import environment

__all__ = ["StaticSubject", "measure_static", "static_table"]

_INT8 = Int8StaticActivationInt8WeightConfig()
_UINT8 = Int8StaticActivationInt8WeightConfig(symmetric_activations=False)
_FLOAT8 = Float8StaticActivationFloat8WeightConfig()
_DYNAMIC = {
    "int8": "int8_dynamic_activation_int8_weight",
    "int8 with zero points": "int8_dynamic_activation_int8_weight/asymmetric",
    "float8": "float8_dynamic_activation_float8_weight",
}


@dataclass(frozen=True)
class StaticSubject:
    """A model, and what it is calibrated and judged on."""

    #: gives copies of the original, which may share its parameters
    copy: Callable[[], nn.Module]
    #: for `quantize_`
    data: Sequence[Any]
    #: a quantized model -> figures by name
    quality: Callable[[nn.Module], Mapping[str, float]]
    #: names of weights that no row quantizes
    dense: tuple[str, ...] = ()


def static_table(dense: tuple[str, ...] = ()) -> dict[str, dict[str, Config | list[Config]]]:
    """Format of both operands -> what is called how; `dense` names weights that stay as they are."""

    def apart(config: str | Config) -> Config:
        return FqnToConfig({**dict.fromkeys(dense), "*": config})

    table: dict[str, dict[str, Config | list[Config]]] = {}
    for format_, static in (
        ("int8", _INT8),
        ("int8 with zero points", _UINT8),
        ("float8", _FLOAT8),
    ):
        table[format_] = {
            "dynamic": apart(_DYNAMIC[format_]),
            "static, keep": apart(replace(static, on_outliers="keep")),
            "static": apart(static),
            "static, ratio 3": apart(replace(static, max_error_ratio=3.0)),
            "static, percentile": apart(replace(static, observer="percentile")),
            "SmoothQuant, static": [SmoothQuantConfig(), apart(static)],
        }
    smooth = SmoothQuantConfig(Int8DynamicActivationInt8WeightConfig())
    table["int8"]["SmoothQuant, dynamic"] = apart(smooth)
    return table


def measure_static(path: Path, about: Mapping[str, Any], subject: StaticSubject) -> None:
    """Add the rows that are missing to a JSON file; each is written as soon as it is there.

    Args:
        path: of the file. The rows that are there stay.
        about: what was measured on.
        subject: the model.
    """
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    done = {(row["format"], row["activations"]) for row in found["rows"]}
    for format_, configs in static_table(subject.dense).items():
        for name, config in configs.items():
            if (format_, name) in done:
                continue
            made = subject.copy()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", OutlierWarning)  # the table counts them
                data = None if name == "dynamic" else subject.data
                report: Any = quantize_(made, config, data=data)
            changed = report.with_status("changed")
            is_static = [" static" in record.spec for record in changed]
            row = {
                "format": format_,
                "activations": name,
                **subject.quality(made),
                "weights": len(changed),
                "static": sum(is_static),
                "left_dynamic": [
                    record.fqn
                    for record, static in zip(changed, is_static, strict=True)
                    if name != "dynamic" and not static
                ],
            }
            found["rows"].append(row)
            made_of = {"about": {**environment(), **about}, "rows": found["rows"]}
            path.write_text(json.dumps(made_of, indent=1) + "\n", encoding="utf-8")
