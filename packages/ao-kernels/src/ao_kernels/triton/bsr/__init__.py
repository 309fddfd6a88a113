"""Products with block-sparse weights (BSR)."""
