"""Quantized models on their way out: distributed checkpoints, ONNX, ExecuTorch.

Each module is imported by its name, and needs no library but torch until a function is called that writes a
file of another project.
"""
