"""Weights on a trellis: decoded for a matmul, or to dense values."""
