// Matmuls and attention with dot products of bytes; all else is that of NEON, which every such processor has.
#define AO_ISA neon_dotprod
#include "simd/neon_dotprod.h"

#include "isa_products.h"
