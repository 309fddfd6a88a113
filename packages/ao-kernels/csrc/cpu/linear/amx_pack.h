// Activations as tile registers take them: (block of 16 rows, part, register, row, columns), rows and columns that
// there are not being 0. Parts are bfloat16 numbers whose sum is the activation.
#pragma once
#include "pack.h"

namespace ao::AO_ISA {

// The first `count` numbers in bfloat16 that v is the sum of: all but 8, 16 or 24 bits of it are left out.
struct Parts {
  F left;
  AO_METHOD F next() {
    // a multiplication turns every NaN into one whose upper bits say so
    const F part = as_float(and_(bits_of(mul(left, splat(1.0f))), splat_int(static_cast<int32_t>(0xffff0000))));
    left = rest_of(left, part);
    return part;
  }
};

static void pack_tile_row(const Linear& t, int64_t r, uint8_t* out) {
  const RowPacker packer = packer_of(t, r);
  const bool bytes = t.mode == Mode::int8;
  const int64_t line = tile_line(t), size = 16 * bytes_of(t.mode), part_bytes = tile_steps(t) * kTileRows * line;
  const int64_t stride = t.row_blocks * kTileRows;  // of sums, for rows that there are not, too
  KRange at = k_range_of(t, 0);
  int64_t slot = 0;
  for (int64_t s = 0; s < t.step_count; ++s) {
    if (t.steps[s].group != at.group) at = k_range_of(t, t.steps[s].group);
    F total = zero();
    for (int tile = 0; tile < t.steps[s].tiles; ++tile, at.k += 16, ++slot) {
      const int count = at.count();
      uint8_t* to = out + slot / t.tiling.depth * kTileRows * line + slot % t.tiling.depth * size;
      // padding is 0, not code 0 less 128
      const F v = _mm512_maskz_mov_ps(count < 16 ? first(count) : 0xffff, packer.values(at.k, count));
      total = add(total, v);
      if (bytes) {
        store_bytes(to, round_to_int(v));
        continue;
      }
      Parts parts{swap_middle(v)};
      for (int part = 0; part < t.tiling.x_parts; ++part) store_exact_bf16(to + part * part_bytes, parts.next());
    }
    const float value = sum(total);
    if (bytes && t.zero_type == Zero::none) {
      static_cast<int32_t*>(t.x_sums)[s * stride + r] = static_cast<int32_t>(value) * static_cast<int32_t>(t.least);
    } else {
      static_cast<float*>(t.x_sums)[s * stride + r] = value;
    }
  }
}

static void pack_tiles(const Linear& t, int64_t begin, int64_t end) {
  const int64_t block_bytes = kTileRows * tile_row_bytes(t), line = tile_line(t);
  for (int64_t b = begin; b < end; ++b) {
    uint8_t* out = t.x_packed + b * block_bytes;
    const int64_t row = b * kTileRows, rows = t.m - row < kTileRows ? t.m - row : kTileRows;
    if (rows < kTileRows || t.tiles % t.tiling.depth) __builtin_memset(out, 0, static_cast<size_t>(block_bytes));
    for (int64_t r = 0; r < rows; ++r) pack_tile_row(t, row + r, out + r * line);
  }
}

}  // namespace ao::AO_ISA
