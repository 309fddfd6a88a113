"""Algorithms that choose codes, scales or input factors by calibration data."""
