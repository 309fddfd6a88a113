"""Arguments that work, for all parameters without a default, by the name of what takes them."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

import ao_core
from ao_core import Spec, save_model

__all__ = ["VALID", "folder", "model"]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


X = torch.ones(4, 64)
W = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
INT8 = Spec("int8", (1, -1))
STATIC = "int8_static_activation_int8_weight"


@cache
def folder():
    from tempfile import mkdtemp

    path = mkdtemp(prefix="ao-misuse-")
    save_model(model(), path)
    return path


def prepared():
    import ao_quant

    made = model()
    calibration = ao_quant.prepare(made, STATIC)
    with ao_quant.calibrate(made):
        made(X)
    assert not calibration.unseen
    return made


def watched():
    import ao_quant

    made = model()
    ao_quant.prepare(made, STATIC)
    return made


def corrected():
    made = model()
    ao_core.quantize_(made, "int4_weight_only")
    return made


@cache
def imatrix_file():
    from tempfile import mkdtemp

    from ao_quant.gguf import imatrix_of, write_imatrix

    path = Path(mkdtemp(prefix="ao-misuse-"), "x.dat")
    write_imatrix(path, imatrix_of(model(), [X]), binary=True)
    return path


def trained():
    import ao_float8

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = model()
        ao_float8.convert_to_float8_training(made, config="float8/rowwise")
    return made


def masked():
    import ao_sparsity

    made = model()
    ao_sparsity.apply_fake_sparsity(made, ao_sparsity.Unstructured(0.5))
    return made


def sparse():
    import ao_sparsity

    made = model()
    swap = ao_sparsity.swap_linear_with_semi_sparse_linear
    swap(made, {"0": ao_sparsity.SemiSparseLinear})
    return made


def supermask():
    import ao_sparsity

    return nn.Sequential(ao_sparsity.SupermaskLinear(64, 64))


def adam(made):
    return torch.optim.SGD(made.parameters(), lr=0.1)


def with_optimizer():
    made = model()
    return {"model": made, "optimizer": adam(made)}


def unstructured():
    import ao_sparsity

    return ao_sparsity.Unstructured(0.5)


def pruning(**more):
    return {"model": model(), "pattern": unstructured(), **more}


def gradual():
    import ao_sparsity

    return pruning(schedule=ao_sparsity.LinearSchedule(0.5, 10))


def gguf_file():
    from ao_quant.gguf import write_gguf

    path = Path(folder()) / "model.gguf"
    write_gguf(path, {"x": W})
    return path


def optimized():
    import ao_optim

    made = model()
    optimizer = ao_optim.AdamW8bit(made.parameters())
    made(X).sum().backward()
    optimizer.step()
    return optimizer


def llama():
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )


def cached():
    from transformers import LlamaForCausalLM

    return {"model": LlamaForCausalLM(llama()), "data": [X.new_ones(1, 128).long()], "bits": 11.0}


VALID = {
    "ComputeWeight": lambda: {"memory": W, "output": INT8},
    "DType": lambda: {"name": "x", "bits": 4, "kind": "int", "encode": id, "decode": id, "min": -1.0,
                      "max": 1.0, "quant_max": 1.0},
    "FqnToConfig": lambda: {"entries": {"*": "int8_weight_only"}},
    "Algorithm": lambda: {"name": "x", "config_type": ao_core.WeightOnlyConfig, "needs": id, "solve": id},
    "Op": lambda: {"name": "x", "call": object, "reference": id, "doc": "Returns x."},
    "Kernel": lambda: {"name": "x", "op": "linear", "layout": "*", "device": "*", "fn": id, "priority": 1},
    "QTensor": lambda: {"parts": {"qdata": W.to(torch.int8), "scale": W[:, :1]}, "spec": INT8,
                        "shape": (64, 64), "dtype": torch.float32},
    "AoConfig": lambda: {"config": "int8_weight_only"},
    "AoCache": lambda: {"config": llama()},
    "AoEncoderDecoderCache": lambda: {"config": llama()},
    "plan_cache": cached,
    "fuse": lambda: {"model": model()},
    "unfuse": lambda: {"model": model()},
    "memory_footprint": lambda: {"model": model()},
    "FolderKind": lambda: {
        "name": "x", "recognizes": bool, "refuses": str, "files": dict, "hint": str,
    },
    "FolderModel": lambda: {"model": model(), "names": {}},
    "Recipe": lambda: {"name": "x", "config": ao_core.WeightOnlyConfig()},
    "ScaleMethod": lambda: {"name": "x", "choose": None},
    "Skip": lambda: {"reason": "x"},
    "Spec": lambda: {"dtype": "int8", "block": (1, -1)},
    "Target": lambda: {"fqn": "weight", "module": nn.Linear(2, 2), "name": "weight"},
    "Transform": lambda: {"config_type": ao_core.WeightOnlyConfig, "name": "x", "version": 1, "apply": id},
    "lut_dtype": lambda: {"name": "x", "values": [0.0, 1.0]},
    "config_from_dict": lambda: {"data": {"name": "weight_only"}},
    "config_from_json": lambda: {"text": '{"name": "weight_only"}'},
    "config_from_yaml": lambda: {"text": "name: weight_only"},
    "config_to_dict": lambda: {"config": ao_core.WeightOnlyConfig()},
    "config_to_json": lambda: {"config": ao_core.WeightOnlyConfig()},
    "config_to_yaml": lambda: {"config": ao_core.WeightOnlyConfig()},
    "dequantize_": lambda: {"model": model()},
    "batch_invariant": dict,
    "is_batch_invariant": dict,
    "explain": lambda: {"model_or_qtensor": model()},
    "float_dtype": lambda: {"name": "x", "fmt": import_module("ao_core.ext.numerics").E4M3},
    "int_dtype": lambda: {"name": "x", "bits": 4},
    "kernels": lambda: {"band": "reference"},
    "load_model": lambda: {"model": model(), "dir": folder()},
    "open_checkpoint": lambda: {"path": folder()},
    "open_files": lambda: {"files": [f"{folder()}/model.safetensors"]},
    "plan_checkpoint": lambda: {"src": folder(), "config": "int8_weight_only"},
    "quantize_": lambda: {"model": model(), "config": "int8_weight_only"},
    "quantize_tensor": lambda: {"x": W, "spec": INT8},
    "resolve_config": lambda: {"config": "int8_weight_only"},
    "verify_checkpoint": lambda: {"path": folder()},
    "autoquant": lambda: {"model": model(), "example_input": X, "rounds": 1, "cache": False,
                          "candidates": ["int8_weight_only"], "timer": lambda trial: 1.0},
    "calibrate": lambda: {"model": watched()},
    "convert": lambda: {"model": prepared()},
    "discard": lambda: {"model": prepared()},
    "plan": lambda: {"model": model(), "bits": 8.5, "sample": X, "candidates": ["int8_weight_only"]},
    "prepare": lambda: {"model": model(), "config": STATIC},
    "recommend": lambda: {"model": model(), "data": [X], "candidates": ["int8_weight_only"],
                          "timer": lambda made: 1.0, "rounds": 1},
    "convert_to_float8_training": lambda: {"model": model(), "config": "float8/rowwise"},
    "float8_fallback": lambda: {"model": trained(), "patterns": "0"},
    "precision_telemetry": lambda: {"model": trained()},
    "stochastic_rounding": lambda: {"generator": torch.Generator()},
    "Blocks": lambda: {"sparsity": 0.5}, "Columns": lambda: {"sparsity": 0.5},
    "Heads": lambda: {"sparsity": 0.5}, "Rows": lambda: {"sparsity": 0.5},
    "Unstructured": lambda: {"sparsity": 0.5},
    "CubicSchedule": lambda: {"final": 0.5, "end": 9}, "LinearSchedule": lambda: {"final": 0.5, "end": 9},
    "OneShotSchedule": lambda: {"final": 0.5, "end": 9},
    "GradualPruning": gradual,
    "Movement": with_optimizer,
    "SemiSparseActivationLinear": lambda: {"in_features": 8, "out_features": 8},
    "SemiSparseLinear": lambda: {"in_features": 8, "out_features": 8},
    "SparseLinear": lambda: {"in_features": 8, "out_features": 8},
    "SupermaskLinear": lambda: {"in_features": 8, "out_features": 8},
    "apply_fake_sparsity": lambda: {"model": model()},
    "apply_masks": lambda: {"model": model(), "pruning": {"0.weight": W > 0}},
    "attach_masks": lambda: {"model": model(), "state": {"0.weight_sparsity_mask": W > 0}},
    "channel_groups": lambda: {"model": model(), "example_inputs": (X,)},
    "keep_masks": lambda: {**with_optimizer()},
    "ln_structured": lambda: {"model": model(), "example_inputs": (X,)},
    "prune_magnitude": pruning,
    "prune_sparsegpt": lambda: pruning(data=[X]),
    "prune_wanda": lambda: pruning(data=[X]),
    "remove_channels": lambda: {"model": model(), "example_inputs": (X,), "channels": {"0.weight": [1, 2]}},
    "remove_masks": lambda: {"model": masked()},
    "sensitivity": lambda: pruning(data=[X], levels=(0.5,)),
    "set_sparsity": lambda: {"model": supermask(), "sparsity": 0.5},
    "sparsify_": lambda: {"model": model(), "config": "semi_sparse_weight"},
    "squash_masks": lambda: {"model": supermask()},
    "swap_linear_with_semi_sparse_linear": lambda: {
        "model": model(), "config": {"0": import_module("ao_sparsity").SemiSparseLinear}},
    "swap_semi_sparse_linear_with_linear": lambda: {"model": sparse()},
    "tile_mask": lambda: {"weight": W},
    "CPUOffloadOptimizer": lambda: {"params": list(model().parameters())},
    "GaLore": lambda: {"params": list(model().parameters())},
    "StateFormat": lambda: {"name": "x"},
    "full_state": lambda: {"state_dict": optimized().state_dict()},
    "state_report": lambda: {"optimizer": optimized()},
    "flat_to_state_dict": lambda: {"tensors": {"x": W}, "metadata": {}},
    "state_dict_to_flat": lambda: {"state_dict": {"x": W}},
    "read_gguf": lambda: {"path": gguf_file()},
    "read_gguf_header": lambda: {"path": gguf_file()},
    "read_imatrix": lambda: {"path": imatrix_file()},
    "imatrix_of": lambda: {"model": model(), "data": [X]},
    "low_rank_corrections": lambda: {"model": corrected(), "originals": model(), "data": [X]},
    "ModelTransform": lambda: {"name": "x", "config_type": ao_core.WeightOnlyConfig, "apply": id},
    "Prepared": lambda: {"model": model()},
    "Tokenizer": lambda: {"encode": list, "sample": id},
}  # fmt: skip
