"""Generating text with quantized models, measuring how fast they do it, and how far they are off.

The functions under the commands `ao generate`, `ao bench` and `ao eval`. They need transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core.ext import lazy_names

if TYPE_CHECKING:
    from ao_hf.generation.evaluating import (
        Quality,
        Variant,
        default_text,
        evaluate,
        score_tasks,
        windows_of,
    )
    from ao_hf.generation.measuring import (
        Measured,
        Sample,
        Workload,
        measure,
        runner_of,
        weights_read,
    )
    from ao_hf.generation.models import Loaded, draft_of, load
    from ao_hf.generation.passes import (
        MeasuredPass,
        Pass,
        PassSample,
        measure_passes,
        pass_runner,
    )
    from ao_hf.generation.writing import Drafted, Sampling, Written, generate, tokens_of

#: name -> module that defines it
_MODULES = {
    "Drafted": "ao_hf.generation.writing",
    "Loaded": "ao_hf.generation.models",
    "Sampling": "ao_hf.generation.writing",
    "Written": "ao_hf.generation.writing",
    "Quality": "ao_hf.generation.evaluating",
    "Variant": "ao_hf.generation.evaluating",
    "default_text": "ao_hf.generation.evaluating",
    "evaluate": "ao_hf.generation.evaluating",
    "score_tasks": "ao_hf.generation.evaluating",
    "windows_of": "ao_hf.generation.evaluating",
    "draft_of": "ao_hf.generation.models",
    "generate": "ao_hf.generation.writing",
    "load": "ao_hf.generation.models",
    "Measured": "ao_hf.generation.measuring",
    "MeasuredPass": "ao_hf.generation.passes",
    "Pass": "ao_hf.generation.passes",
    "PassSample": "ao_hf.generation.passes",
    "measure_passes": "ao_hf.generation.passes",
    "pass_runner": "ao_hf.generation.passes",
    "Sample": "ao_hf.generation.measuring",
    "Workload": "ao_hf.generation.measuring",
    "measure": "ao_hf.generation.measuring",
    "runner_of": "ao_hf.generation.measuring",
    "weights_read": "ao_hf.generation.measuring",
    "tokens_of": "ao_hf.generation.writing",
}

__all__ = [
    "Drafted",
    "Loaded",
    "Measured",
    "MeasuredPass",
    "Pass",
    "PassSample",
    "Quality",
    "Sample",
    "Sampling",
    "Variant",
    "Workload",
    "Written",
    "default_text",
    "draft_of",
    "evaluate",
    "generate",
    "load",
    "measure",
    "measure_passes",
    "pass_runner",
    "runner_of",
    "score_tasks",
    "tokens_of",
    "weights_read",
    "windows_of",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
