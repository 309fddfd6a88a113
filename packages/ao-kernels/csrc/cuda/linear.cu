// The kernels of one way to store weights: for bfloat16 and float16, and up to 8, 16, 32 and 64 rows of activations.
// `cuda_build.py` compiles this file for each way, and says which one: AO_CODES, AO_PLANE, AO_SUMS.
#include "machine.h"

#include "linear.h"

namespace ao::gpu {

template <class E, int BM>
__device__ __forceinline__ void matmul(const Linear& given) {
  extern __shared__ __align__(128) uint8_t shared[];
#ifdef AO_CASE
  Linear p = given;
  AO_CASE;  // makes parameters constants: what is counted has no branches that a case does not take
#else
  const Linear& p = given;
#endif
  Matmul<Format<AO_CODES<E>, E, AO_PLANE, AO_SUMS>, BM>(p, shared).run();
}

}  // namespace ao::gpu

// `driver.cpp` finds them by these names. Up to 16 rows, two CTAs share an SM
#define AO_KERNEL(element, E, BM)                                                 \
  extern "C" __global__ void __launch_bounds__(ao::gpu::kThreads, BM > 16 ? 1 : 2) \
      ao_linear_##element##_##BM(const __grid_constant__ ao::gpu::Linear p) {     \
    ao::gpu::matmul<ao::gpu::E, BM>(p);                                           \
  }
#define AO_ELEMENTS(BM)      \
  AO_KERNEL(bf16, Bf16, BM)  \
  AO_KERNEL(f16, Fp16, BM)
#ifdef AO_ROWS
AO_ELEMENTS(AO_ROWS)
#else
AO_ELEMENTS(8)
AO_ELEMENTS(16)
AO_ELEMENTS(32)
#if !AO_SUMS  // registers do not hold 64 columns and their sums
AO_ELEMENTS(64)
#endif
#endif
