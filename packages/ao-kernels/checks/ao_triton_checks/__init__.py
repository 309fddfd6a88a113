"""Ahead-of-time checks of Triton kernels without a GPU: compile, count instructions, and model inline PTX."""
