"""MX and NVFP4 in one pass: quantize and dequantize small blocks."""
