// Codes in tile registers where every group of columns has scales of its own: sums leave the registers after each
// group, and are scaled and added up in vectors.
#pragma once
#include "amx_panel.h"

namespace ao::AO_ISA {

// Sums of groups that have left the registers, of several in turn: what is done with one overlaps with the products
// of the next.
struct alignas(64) GroupSums {
  int32_t of[4][kTileRows * 16];
  float pairs[2][2 * kTileRows * kPanelBlocks * 16];
};

// Rows of activations times blocks of N, over consecutive steps: 16 by one of bytes, 32 or 16 by two of pairs.
struct GroupedPart {
  const uint8_t* x;
  const uint8_t* w;
  int64_t x_step, w_step, line;
  const Step* steps;
  int64_t step_count, depth;
  const float* scales;  // (group, 16)
  const float* zero_terms;  // the same, for zero points; or null
  int64_t scale_stride;     // pairs: from one block to the next
  const void* x_sums;   // (step, row): floats for zero points, else integers that sums start with
  int64_t x_sums_stride;
  float* totals;        // (row, N block, 16)
};

template <int kSums, int kX, int kW>
AO_INLINE void multiply_group(const GroupedPart& p, int64_t tiles, const uint8_t*& x, const uint8_t*& w, int32_t* out) {
  tile_zero<kSums>();
  for (; tiles > 0; tiles -= p.depth, x += p.x_step, w += p.w_step) {
    tile_load<kX>(x, p.line);
    tile_load<kW>(w, 64);
    tile_dot<true, kSums, kX, kW>();
  }
  tile_store<kSums>(out, 64);
}

AO_INLINE void add_group(const GroupedPart& p, int64_t step, const int32_t* sums, F (&totals)[kTileRows]) {
  const int64_t at = p.steps[step].group * 16;
  const F scale = load(p.scales + at);
  if (!p.zero_terms) {
    const auto* starts = static_cast<const int32_t*>(p.x_sums) + step * p.x_sums_stride;
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      totals[r] = fma(scale, to_float(add(load_vector(sums + r * 16), splat_int(starts[r]))), totals[r]);
    }
    return;
  }
  const auto* x_sums = static_cast<const float*>(p.x_sums) + step * p.x_sums_stride;
  const F zero_term = load(p.zero_terms + at);
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
    totals[r] = fma(scale, to_float(load_vector(sums + r * 16)), fma(zero_term, splat(x_sums[r]), totals[r]));
  }
}

static void multiply_groups(const GroupedPart& p, GroupSums& sums) {
  F totals[kTileRows];
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) totals[r] = load(p.totals + r * kPanelBlocks * 16);
  const uint8_t *x = p.x, *w = p.w;
  int64_t s = 0;
  for (; s + 4 <= p.step_count; s += 4) {
    multiply_group<0, 4, 6>(p, p.steps[s].tiles, x, w, sums.of[0]);
    multiply_group<1, 5, 7>(p, p.steps[s + 1].tiles, x, w, sums.of[1]);
    add_group(p, s, sums.of[0], totals);
    multiply_group<2, 4, 6>(p, p.steps[s + 2].tiles, x, w, sums.of[2]);
    add_group(p, s + 1, sums.of[1], totals);
    multiply_group<3, 5, 7>(p, p.steps[s + 3].tiles, x, w, sums.of[3]);
    add_group(p, s + 2, sums.of[2], totals);
    add_group(p, s + 3, sums.of[3], totals);
  }
  for (; s < p.step_count; ++s) {
    multiply_group<0, 4, 6>(p, p.steps[s].tiles, x, w, sums.of[0]);
    add_group(p, s, sums.of[0], totals);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) store(p.totals + r * kPanelBlocks * 16, totals[r]);
}

// -- bfloat16 -----------------------------------------------------------------------------------------------

// Several registers make each product, so that there is time to add to totals in memory.
template <int kRows>
static void add_pair_group(const GroupedPart& p, int64_t step, const float* sums) {
  const int64_t at = p.steps[step].group * 16;
  const auto* x_sums = static_cast<const float*>(p.x_sums) + step * p.x_sums_stride;
#pragma GCC unroll 2
  for (int c = 0; c < kPanelBlocks; ++c) {
    const F scale = load(p.scales + c * p.scale_stride + at);
    const F zero_term = p.zero_terms ? load(p.zero_terms + c * p.scale_stride + at) : zero();
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const int64_t place = (r * kPanelBlocks + c) * 16;
      F total = load(p.totals + place);
      if (p.zero_terms) total = fma(zero_term, splat(x_sums[r]), total);
      store(p.totals + place, fma(scale, load(sums + place), total));
    }
  }
}

template <int kRowBlocks>
static void multiply_pair_groups(const GroupedPart& p, TilePart tiles, GroupSums& sums) {
  tiles.starts = true;
  for (int64_t s = 0; s < p.step_count; ++s) {
    tiles.steps = (p.steps[s].tiles + p.depth - 1) / p.depth;
    multiply_tiles<false, kRowBlocks>(tiles, sums.pairs[s % 2]);
    tiles.x += tiles.steps * tiles.x_step, tiles.w += tiles.steps * tiles.w_step;
    if (s > 0) add_pair_group<kRowBlocks * kTileRows>(p, s - 1, sums.pairs[(s - 1) % 2]);
  }
  add_pair_group<kRowBlocks * kTileRows>(p, p.step_count - 1, sums.pairs[(p.step_count - 1) % 2]);
}

}  // namespace ao::AO_ISA
