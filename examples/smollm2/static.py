"""What static scales of activations cost SmolLM2-135M, next to dynamic ones.

`python static.py --json static.json`. Scales are found on docstrings of the standard library, and measured on
other text, the sections of Python's documentation. A run goes on where the one before ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from algorithms import calibration, original
from smollm2 import evaluate, model

from ao_core import Config, FqnToConfig, quantize_
from ao_quant import (
    Float8StaticActivationFloat8WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    OutlierWarning,
    SmoothQuantConfig,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "minilm"))
from minilm_demo.results import environment

#: tokens that scales are found on, and windows of 512 tokens that are measured
CALIBRATION, WINDOWS = 2048, 4
_INT8 = Int8StaticActivationInt8WeightConfig()
_UINT8 = Int8StaticActivationInt8WeightConfig(symmetric_activations=False)
_FLOAT8 = Float8StaticActivationFloat8WeightConfig()


def without_head(config: str | Config) -> FqnToConfig:
    """The recipe for all weights that static ones quantize: a head tied to an embedding is none of these."""
    return FqnToConfig({"model.embed_tokens": None, "lm_head": None, "*": config})


#: format of both operands -> what is called how
TABLE: dict[str, dict[str, Config | list[Config]]] = {
    "int8": {
        "dynamic": without_head("int8_dynamic_activation_int8_weight"),
        "static, keep": replace(_INT8, on_outliers="keep"),
        "static": _INT8,
        "static, percentile": replace(_INT8, observer="percentile"),
        "SmoothQuant, dynamic": without_head(
            SmoothQuantConfig(Int8DynamicActivationInt8WeightConfig())
        ),
        "SmoothQuant, static": [SmoothQuantConfig(), _INT8],
    },
    "int8 with zero points": {
        "dynamic": without_head("int8_dynamic_activation_int8_weight/asymmetric"),
        "static, keep": replace(_UINT8, on_outliers="keep"),
        "static": _UINT8,
    },
    "float8": {
        "dynamic": without_head("float8_dynamic_activation_float8_weight"),
        "static, keep": replace(_FLOAT8, on_outliers="keep"),
        "static": _FLOAT8,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="figures; those there are kept")
    path = parser.parse_args().json
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    done = {(row["format"], row["activations"]) for row in found["rows"]}
    dense = original(0)
    data = calibration(CALIBRATION, 0)
    windows = evaluate.spread(model.tokens(evaluate.text()), WINDOWS)
    logs = evaluate.predict(dense, windows)
    for format_, configs in TABLE.items():
        for name, config in configs.items():
            if (format_, name) in done:
                continue
            made = model.share(dense)
            needs = name != "dynamic"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", OutlierWarning)  # the table counts them
                report: Any = quantize_(made, config, data=data if needs else None)
            quality = evaluate.quality(logs, windows, partial(evaluate.predict, made))
            changed = report.with_status("changed")
            row = {
                "format": format_,
                "activations": name,
                **asdict(quality),
                "weights": len(changed),
                "static": sum("static" in record.spec for record in changed),
            }
            found["rows"].append(row)
            print(row, flush=True)
            about = {"tokens": windows.numel(), "calibration_tokens": CALIBRATION}
            made_of = {"about": {**environment(), **about}, "rows": found["rows"]}
            path.write_text(json.dumps(made_of, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
