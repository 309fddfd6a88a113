"""accelerate with quantized models: device maps, offloading to disk, saving.

`accelerate.dispatch_model` and `accelerate.cpu_offload` take quantized models as they are. What writes
weights to files, or counts their bytes, cannot: accelerate writes one array for each parameter, and a
quantized one has several. The functions here have the names and the arguments of accelerate's own, and keep
weights in a checkpoint of ao.
"""

from __future__ import annotations

from ao_hf.accelerate.device_maps import infer_auto_device_map
from ao_hf.accelerate.offload import disk_offload, dispatch_model, load_checkpoint_and_dispatch
from ao_hf.accelerate.saving import register_checkpoints, save_model

__all__ = [
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "load_checkpoint_and_dispatch",
    "register_checkpoints",
    "save_model",
]
