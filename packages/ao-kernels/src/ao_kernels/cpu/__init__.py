"""Kernels for the CPU, in C++; `library` loads them."""
