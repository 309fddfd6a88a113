// AVX-512 F, BW, VL, DQ and VNNI alone. What is missing is made of these: moves of bytes in bytes512.h, and bfloat16 in
// avx512.h; matmuls of bfloat16 are products of words, or of float32.
#pragma once
#include "avx512.h"
