"""Kernels for NVIDIA GPUs, in Triton; the modules in `kernels` import it, and nothing else does."""
