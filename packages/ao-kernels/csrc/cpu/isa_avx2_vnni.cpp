// Matmuls with the dot products of AVX-VNNI; all else is that of AVX2, which every such processor has.
#define AO_ISA avx2_vnni
#include "simd/avx2.h"

#include "linear/columns.h"

namespace ao {

extern const LinearKernels isa_avx2_vnni;
const LinearKernels isa_avx2_vnni = avx2_vnni::kLinearKernels;

}  // namespace ao
