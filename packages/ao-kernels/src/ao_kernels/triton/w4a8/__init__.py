"""Matmuls of activations in 8 bits with weights in 4 bits (W4A8)."""
