"""Rows quantized in one pass, also fused with RMSNorm or SiLU."""
