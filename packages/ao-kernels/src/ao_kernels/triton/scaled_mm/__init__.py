"""Matmuls of two operands in 8 bits (W8A8): scaled mm, dense and grouped."""
