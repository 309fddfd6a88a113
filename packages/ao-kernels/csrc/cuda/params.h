// What a launch of the CUDA matmul is told, and how its shared memory is laid out. Plain C++: the host and the device
// include it, and so do the tests.
#pragma once

#include <cstdint>

namespace ao::gpu {

constexpr int kWarps = 8;           // of a CTA
constexpr int kThreads = 32 * kWarps;
constexpr int kSlab = 32;           // of N: what a warp multiplies
constexpr int kTileN = 128;         // of N: a tile of the layout plane16, which is four slabs
constexpr int kMaxStages = 4;
constexpr int kHeader = 8 * kWarps * kMaxStages;  // bytes of shared memory: one mbarrier per warp and stage

enum class Number : int32_t { none, u8, bf16, f16, f32 };

constexpr int bytes_of(Number type) { return type == Number::f32 ? 4 : type == Number::u8 ? 1 : type == Number::none ? 0 : 2; }

// y (m, n) = x (m, k) @ weight (n, k).T + bias. A weight lies in tiles [n / 128][k_tiles][128][plane] of 16-bit words;
// scales and zero points in blocks [n / 128][groups][128].
struct Linear {
  const void *x, *qdata, *scale, *zero, *bias;  // zero, bias: nullptr where there are none
  void* out;
  int64_t x_stride;  // elements from row to row
  int32_t m, n, k;
  int32_t k_tiles, slabs;
  int32_t n_warps;          // slabs of a CTA; its kWarps / n_warps warps of each take turns along K
  int32_t tiles_per_split;  // of K, for a CTA: those of a cluster share the rest
  int32_t groups_per_tile;  // scales per row of a tile; 0: one scale per row of the weight
  int32_t group_shift;      // a group has 1 << group_shift planes
  Number scale_type, zero_type;
  int32_t stages;
  // bytes: of a row of activations in a stage, of a stage; where scales, zero points, activations begin in it
  int32_t x_row, stage_bytes, scale_at, zero_at, x_at;
};

}  // namespace ao::gpu
