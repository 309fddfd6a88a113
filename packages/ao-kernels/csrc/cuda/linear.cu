// The kernels: one for each way to store weights, element of the activations, and number of rows.
#include "machine.h"

#include "linear.h"

namespace ao::gpu {

template <class Format, int BM>
__device__ __forceinline__ void matmul(const Linear& p) {
  extern __shared__ __align__(128) uint8_t shared[];
  Matmul<Format, BM>(p, shared).run();
}

}  // namespace ao::gpu

// `driver.cpp` finds them by these names
#define AO_KERNEL(name, Codes, element, E, PLANE, SUMS, BM)                                               \
  extern "C" __global__ void __launch_bounds__(ao::gpu::kThreads, BM > 16 ? 1 : 2)                       \
      ao_linear_##name##_##element##_##BM(const __grid_constant__ ao::gpu::Linear p) {                    \
    ao::gpu::matmul<ao::gpu::Format<ao::gpu::Codes<ao::gpu::E>, ao::gpu::E, PLANE, SUMS>, BM>(p);         \
  }
#define AO_ROWS(name, Codes, element, E, PLANE, SUMS) \
  AO_KERNEL(name, Codes, element, E, PLANE, SUMS, 8)  \
  AO_KERNEL(name, Codes, element, E, PLANE, SUMS, 16) \
  AO_KERNEL(name, Codes, element, E, PLANE, SUMS, 32) \
  AO_KERNEL(name, Codes, element, E, PLANE, SUMS, 64)
#define AO_ELEMENTS(name, Codes, PLANE, SUMS)       \
  AO_ROWS(name, Codes, bf16, Bf16, PLANE, SUMS)     \
  AO_ROWS(name, Codes, f16, Fp16, PLANE, SUMS)

// AO_ONLY_* compile a part of them, in a compiler's process of its own
#if !defined(AO_PART) || AO_PART == 0
AO_ELEMENTS(int4, Int4, 64, false)
#endif
#if !defined(AO_PART) || AO_PART == 1
AO_ELEMENTS(int4_g32, Int4, 32, false)
#endif
#if !defined(AO_PART) || AO_PART == 2
AO_ELEMENTS(int4_sums, Int4, 64, true)
#endif
#if !defined(AO_PART) || AO_PART == 3
AO_ELEMENTS(int4_g32_sums, Int4, 32, true)
#endif
#if !defined(AO_PART) || AO_PART == 4
AO_ELEMENTS(int8, Int8, 64, false)
#endif
#if !defined(AO_PART) || AO_PART == 5
AO_ELEMENTS(f8e4m3, E4m3, 64, false)
#endif
