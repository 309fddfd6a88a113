"""Proofs of GPU kernels that need no GPU: compiled ahead of time, counted, and their assembly modelled."""
