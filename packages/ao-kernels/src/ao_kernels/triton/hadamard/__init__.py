"""The Hadamard transform of blocks."""
