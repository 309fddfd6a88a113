"""Matrices (rows, columns) of models that are measured, each with its name."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]

#: Llama-3-8B: projections of one input are one
LLAMA: Shapes = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
#: how often each is in a step of the model
LLAMA_COUNTS = {"qkv": 32, "o": 32, "gate_up": 32, "down": 32, "head": 1}
#: Mixtral-8x7B but for what has the shapes of Llama's: attention, and each expert by itself
MIXTRAL: Shapes = {"Mixtral head": (32000, 4096)}
EXPERTS: Shapes = {"Mixtral gate_up": (8, 28672, 4096), "Mixtral down": (8, 4096, 14336)}
#: FLUX.1: 19 blocks of two streams, 38 of one
FLUX: Shapes = {
    "Flux qkv": (9216, 3072),
    "Flux out": (3072, 3072),
    "Flux mlp in": (12288, 3072),
    "Flux mlp out": (3072, 12288),
    "Flux single in": (21504, 3072),
    "Flux single out": (3072, 15360),
}
TINY: Shapes = {"tiny": (64, 256)}
TINY_EXPERTS: Shapes = {"tiny experts": (3, 64, 144)}
