"""The jit functions themselves."""
