"""Matmuls with block-sparse weights (BSR)."""
