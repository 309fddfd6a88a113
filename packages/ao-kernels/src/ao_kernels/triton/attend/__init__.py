"""Attention over quantized keys and values."""
