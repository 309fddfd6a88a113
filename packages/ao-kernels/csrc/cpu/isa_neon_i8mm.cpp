// Matmuls and attention with products of matrices in bytes and bfloat16; all else is that of NEON.
#define AO_ISA neon_i8mm
#include "simd/neon_i8mm.h"

#include "isa_products.h"
