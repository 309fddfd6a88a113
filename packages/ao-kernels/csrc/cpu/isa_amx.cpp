// Matmuls in the tile registers of AMX; all else is that of AVX-512, which every such processor has.
#define AO_ISA amx
#include "linear/amx.h"

namespace ao {

extern const LinearKernels isa_amx;
const LinearKernels isa_amx = amx::kAmxKernels;

}  // namespace ao
