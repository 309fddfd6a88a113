"""Weights on a trellis: 2 to 4 bits each, whose values follow from the bits of several weights."""
