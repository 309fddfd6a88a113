// The GPU as `linear.h` sees it: a number per thread, and PTX for copies, barriers, tensor cores. From sm_80 on; from sm_90
// on, weights are copied in bulk, clusters share a matmul, and kernels start before the one in front has ended.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "params.h"

#define AO_DEVICE __device__ __forceinline__

namespace ao::gpu {

using U32 = uint32_t;
using F32 = float;
using Bool = bool;

#if __CUDA_ARCH__ >= 900
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif

AO_DEVICE U32 lane_index() { return threadIdx.x & 31; }
// from lane 0, so that the compiler knows that it is the same for all
AO_DEVICE int warp_index() { return __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0); }
AO_DEVICE int cta_x() { return blockIdx.x; }
AO_DEVICE int cta_y() { return blockIdx.y; }
AO_DEVICE int ctas_y() { return gridDim.y; }

AO_DEVICE int least(int a, int b) { return min(a, b); }
AO_DEVICE int greatest(int a, int b) { return max(a, b); }
AO_DEVICE int log2_of(int value) { return 31 - __clz(value); }
AO_DEVICE U32 smaller(U32 a, U32 b) { return min(a, b); }
AO_DEVICE U32 larger(U32 a, U32 b) { return max(a, b); }
AO_DEVICE U32 choose(Bool which, U32 a, U32 b) { return which ? a : b; }
// (a & mask) | other and (a & mask) ^ other: one instruction, where the compiler makes two of two constants
AO_DEVICE U32 masked_or(U32 a, U32 mask, U32 other) {
  U32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(a), "r"(mask), "r"(other));
  return out;
}
AO_DEVICE U32 masked_xor(U32 a, U32 mask, U32 other) {
  U32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(out) : "r"(a), "r"(mask), "r"(other));
  return out;
}
AO_DEVICE F32 fma(F32 a, F32 b, F32 c) { return __fmaf_rn(a, b, c); }

// Pairs of 16-bit numbers, and a product of 16 × 16 weights with 16 × 8 activations in the fragments of m16n8k16.
#define AO_ELEMENT(Name, Type, name, PAIR, ONES, MANTISSA, FLOAT8)                                            \
  struct Name {                                                                                               \
    static constexpr Number number = Number::name;                                                            \
    static constexpr int mantissa = MANTISSA;                                                                 \
    static constexpr uint32_t ones = ONES, times_float8 = FLOAT8;                                             \
    AO_DEVICE static U32 fma(U32 a, U32 b, U32 c) {                                                           \
      U32 out;                                                                                                \
      asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));                            \
      return out;                                                                                             \
    }                                                                                                         \
    AO_DEVICE static void mma(F32 (&d)[4], const U32 (&a)[4], U32 b0, U32 b1) {                               \
      asm("mma.sync.aligned.m16n8k16.row.col.f32." #name "." #name ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "      \
          "{%8,%9}, {%0,%1,%2,%3};"                                                                           \
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                    \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                    \
    }                                                                                                         \
    AO_DEVICE static Type rounded(F32 value) { return Type(value); }                                          \
  };
AO_ELEMENT(Bf16, __nv_bfloat16, bf16, "bf16x2", 0x3f803f80, 7, 0x7b807b80)   // 2^120
AO_ELEMENT(Fp16, __half, f16, "f16x2", 0x3c003c00, 10, 0x5c005c00)           // 2^8
#undef AO_ELEMENT

AO_DEVICE void load128(U32 (&out)[4], const uint8_t* base, U32 at) {
  const uint4 found = *reinterpret_cast<const uint4*>(base + at);
  out[0] = found.x, out[1] = found.y, out[2] = found.z, out[3] = found.w;
}
AO_DEVICE U32 load32(const uint8_t* base, U32 at) { return *reinterpret_cast<const U32*>(base + at); }
AO_DEVICE void store128(float* base, U32 at, const F32 (&in)[4]) {
  *reinterpret_cast<float4*>(base + at) = make_float4(in[0], in[1], in[2], in[3]);
}
AO_DEVICE F32 load_shared(const float* base, U32 at, Bool inside) { return inside ? base[at] : 0.f; }
AO_DEVICE void store_shared(float* base, U32 at, F32 value, Bool inside) {
  if (inside) base[at] = value;
}

// Four neighbours, at their own alignment times four.
AO_DEVICE void load_numbers(F32 (&out)[4], const uint8_t* base, U32 at, Number type) {
  if (type == Number::f32) {
    const float4 found = *reinterpret_cast<const float4*>(base + at);
    out[0] = found.x, out[1] = found.y, out[2] = found.z, out[3] = found.w;
    return;
  }
  const uint2 found = *reinterpret_cast<const uint2*>(base + at);
  if (type == Number::bf16) {
    out[0] = __uint_as_float(found.x << 16), out[1] = __uint_as_float(found.x & 0xffff0000);
    out[2] = __uint_as_float(found.y << 16), out[3] = __uint_as_float(found.y & 0xffff0000);
  } else {
    const __half2* pairs = reinterpret_cast<const __half2*>(&found);
    out[0] = __low2float(pairs[0]), out[1] = __high2float(pairs[0]);
    out[2] = __low2float(pairs[1]), out[3] = __high2float(pairs[1]);
  }
}

AO_DEVICE F32 load_global(const void* base, U32 at, Number type, Bool inside) {
  if (!inside) return 0.f;
  if (type == Number::f32) return static_cast<const float*>(base)[at];
  if (type == Number::bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[at]);
  return __half2float(static_cast<const __half*>(base)[at]);
}
template <class E>
AO_DEVICE void store_global(void* base, U32 row, U32 stride, U32 at, F32 value, Bool inside) {
  const auto number = E::rounded(value);
  using Type = decltype(E::rounded(value));
  if (inside) static_cast<Type*>(base)[static_cast<uint64_t>(row) * stride + at] = number;
}

AO_DEVICE uint32_t place(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }

// Weights are read once: they leave L2 first.
AO_DEVICE uint64_t read_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes of which the last may be zeros, where active, from global to shared memory; done when a wait says so.
AO_DEVICE void copy16(uint8_t* to, U32 to_at, const uint8_t* from, U32 from_at, U32 bytes, Bool active) {
  if (active) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place(to) + to_at), "l"(from + from_at), "r"(bytes)
                 : "memory");
  }
}
AO_DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most so many of the last committed groups of copies are not done.
AO_DEVICE void wait_committed(int count) {
  if (count == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (count == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  if (count == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
}

AO_DEVICE void start_barrier(uint64_t* barrier) {
  if constexpr (kHopper) {
    if (lane_index() == 0) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(place(barrier)) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }
}

// A piece of weights, by one warp: in bulk, which the barrier tells the end of; on sm_80 like the rest.
template <int BYTES>
AO_DEVICE void copy_piece(uint8_t* to, const uint8_t* from, uint64_t* barrier) {
  if constexpr (kHopper) {
    if (lane_index() == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(place(barrier)), "n"(BYTES) : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
              place(to)),
          "l"(from), "n"(BYTES), "r"(place(barrier)), "l"(read_once())
          : "memory");
    }
  } else {
    const uint64_t policy = read_once();
#pragma unroll
    for (int at = 0; at < BYTES; at += 512) {
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(place(to) + at + 16 * lane_index()),
                   "l"(from + at + 16 * lane_index()), "l"(policy)
                   : "memory");
    }
  }
}
AO_DEVICE void wait_piece(uint64_t* barrier, int phase) {
  if constexpr (kHopper) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            place(barrier)),
        "r"(phase)
        : "memory");
  }
}
template <int BYTES>
AO_DEVICE void prefetch_piece(const uint8_t* from) {
  if constexpr (kHopper) {
    if (lane_index() == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(BYTES) : "memory");
  }
}

// Programmatic dependent launch.
AO_DEVICE void launch_dependents() {
  if constexpr (kHopper) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
AO_DEVICE void wait_for_kernel_before() {
  if constexpr (kHopper) asm volatile("griddepcontrol.wait;" ::: "memory");
}

AO_DEVICE void sync_threads() { __syncthreads(); }
AO_DEVICE void sync_cluster() {
  if constexpr (kHopper) {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  }
}
// A number in the shared memory of another CTA of the cluster, where this CTA has `base`.
AO_DEVICE F32 load_cluster(const float* base, U32 at, int rank, Bool inside) {
  F32 value = 0.f;
  if constexpr (kHopper) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place(base + at)), "r"(rank));
    if (inside) asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
  }
  return value;
}

}  // namespace ao::gpu
