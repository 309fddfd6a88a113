"""Algorithms that choose codes or scales by calibration data: GPTQ, importance-weighted scales, AWQ."""
