"""Casts of matrices to float8, row-major and transposed."""
