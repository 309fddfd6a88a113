"""2:4 sparsification of dense matrices."""
