"""Matmuls in CUDA C++ for NVIDIA GPUs: weight-only, few rows of activations, in the layout `plane16`."""
