"""Matmuls of 16-bit activations with weights of 1 to 8 bits (W4A16 and others)."""
