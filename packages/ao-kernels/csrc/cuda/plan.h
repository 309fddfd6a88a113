// How a matmul is launched: by rules, from its sizes and the device. Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

namespace ao::gpu {

constexpr int kMostRows = 64;    // of activations
constexpr int kMostRowsWithSums = 32;  // with zero points that are floats
constexpr int kMostSplits = 8;   // CTAs of a cluster that every device can have

struct Device {
  int32_t processors;        // SMs
  int32_t shared_of_cta;     // most bytes of shared memory
  int32_t shared_of_processor;
  bool hopper;               // sm_90 or later: clusters, copies in bulk, programmatic dependent launch
};

struct Sizes {
  int64_t m, n, k, group;    // a group of k or more: one scale per row
  int32_t bits;              // 4 or 8
  Number scale_type, zero_type;
};

struct Plan {
  Linear call;               // all but the pointers and x_stride
  int32_t block_m;           // 8, 16, 32 or 64 rows of activations
  int32_t plane;             // K of a plane of the layout
  int32_t ctas, splits;      // grid: ctas × splits; clusters: 1 × splits
  int32_t shared;            // bytes of shared memory of a CTA
};

// As `tiling` of the layout has it, for 4 and 8 bits: 4 planes or 2 of up to 64 of K.
constexpr int plane_of(int64_t k, int64_t group) { return group < k ? static_cast<int>(std::min<int64_t>(group, 64)) : 64; }

// A plan that needs more shared memory than the device has cannot be launched.
inline Plan plan(const Sizes& sizes, const Device& device) {
  Plan plan{};
  Linear& call = plan.call;
  const auto divided = [](int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); };
  const int planes = sizes.bits == 4 ? 4 : 2;
  plan.plane = plane_of(sizes.k, sizes.group);
  const int width = planes * plan.plane;
  call.m = static_cast<int32_t>(sizes.m), call.n = static_cast<int32_t>(sizes.n), call.k = static_cast<int32_t>(sizes.k);
  call.k_tiles = divided(sizes.k, width), call.slabs = divided(sizes.n, kSlab);
  call.scale_type = sizes.scale_type, call.zero_type = sizes.zero_type;
  if (sizes.group < sizes.k) {
    for (int64_t columns = plan.plane; columns < sizes.group; columns *= 2) ++call.group_shift;
    call.groups_per_tile = planes >> call.group_shift;
  }
  plan.block_m = sizes.m <= 8 ? 8 : sizes.m <= 16 ? 16 : sizes.m <= 32 ? 32 : 64;
  // a stage: words, scales, zero points of eight pieces; activations of as many tiles as a CTA multiplies at a time
  const int numbers = call.groups_per_tile ? 4 * kSlab * kWarps : 0;
  call.scale_at = kWarps * kSlab * plan.plane * 2;
  call.zero_at = call.scale_at + numbers * bytes_of(sizes.scale_type);
  call.x_at = call.zero_at + numbers * bytes_of(sizes.zero_type);
  const auto x_row = [&](int n_warps) { return kWarps / n_warps * width * 2 + 64; };  // next to it: in other banks
  const auto shared = [&](int n_warps, int stages) {
    const int sums = kThreads * plan.block_m * 4;
    return kHeader + std::max(stages * (call.x_at + call.m * x_row(n_warps)), sums);
  };
  const auto fits = [&](int n_warps, int stages) { return shared(n_warps, stages) <= device.shared_of_cta; };
  const auto ctas = [&] { return divided(call.slabs, call.n_warps); };

  // activations are read once for each CTA's N: the more rows, the more N, so that L2 keeps up with memory
  call.n_warps = sizes.m <= 4 ? 1 : sizes.m <= 8 ? 2 : sizes.m <= 16 ? 4 : 8;
  while (call.n_warps < kWarps && !fits(call.n_warps, 2)) call.n_warps *= 2;
  // a CTA for each SM: by splits of K where CTAs can add their sums, then by less N
  plan.splits = 1;
  while (device.hopper && plan.splits < kMostSplits && ctas() * plan.splits < 0.9 * device.processors &&
         divided(call.k_tiles, 2 * plan.splits) >= kWarps / call.n_warps) {
    plan.splits *= 2;
  }
  while (call.n_warps > 1 && ctas() * plan.splits < 0.5 * device.processors && fits(call.n_warps / 2, 2)) call.n_warps /= 2;
  plan.ctas = ctas();
  call.tiles_per_split = divided(call.k_tiles, plan.splits);
  call.x_row = x_row(call.n_warps), call.stage_bytes = call.x_at + call.m * call.x_row;

  // the most stages with which two CTAs share an SM; where there are fewer CTAs, or they do not fit, one has it
  const int turns = divided(call.tiles_per_split, kWarps / call.n_warps);
  const auto most_stages = [&](int sharing) {
    int stages = std::min(kMaxStages, std::max(turns + 1, 2));
    while (stages > 1 && (!fits(call.n_warps, stages) ||
                          sharing * (shared(call.n_warps, stages) + 1024) > device.shared_of_processor)) {
      --stages;
    }
    return stages;
  };
  const int on_one = plan.ctas * plan.splits > device.processors && most_stages(2) > 1 ? 2 : 1;
  call.stages = std::max(most_stages(on_one), 2);
  plan.shared = shared(call.n_warps, call.stages);
  return plan;
}

}  // namespace ao::gpu
