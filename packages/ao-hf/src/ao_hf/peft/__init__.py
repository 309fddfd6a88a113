"""Adapters of PEFT over quantized weights: LoRA, rsLoRA, DoRA and QA-LoRA, without patching PEFT.

PEFT's own LoRA layer trains over any quantized weight. `over_quantized` tells PEFT to use
`QuantizedLoraLinear` in its place, whose merge can be undone to the bit, whose DoRA does not dequantize the
weight at every step, and which has QA-LoRA.
"""

from ao_hf.peft.files import Factors, save_adapter
from ao_hf.peft.initialize import InitRecord, initialize_adapters_
from ao_hf.peft.layer import QuantizedLoraLinear, load_adapter, over_quantized
from ao_hf.peft.originals import Originals
from ao_hf.peft.prepare import prepare_model_for_kbit_training
from ao_hf.peft.report import MergeRecord, MergeReport, merge_report

__all__ = [
    "Factors",
    "InitRecord",
    "MergeRecord",
    "MergeReport",
    "Originals",
    "QuantizedLoraLinear",
    "initialize_adapters_",
    "load_adapter",
    "merge_report",
    "over_quantized",
    "prepare_model_for_kbit_training",
    "save_adapter",
]
