"""Calibration: what a model's weights are multiplied with, seen and gathered from batches of data."""
