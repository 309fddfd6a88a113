// Activations as the matmuls with stored blocks read them: rows in the numbers of the mode, padded to whole blocks.
#pragma once
#include "../linear/pack.h"
#include "kernels.h"

namespace ao::AO_ISA {

// Infinities and NaN stay what they are.
static float lift_of_finite(int32_t bits) { return bits >= 0x7f800000 ? 1.0f : lift_of(bits); }

static void measure_activations(const BlockSparse& t, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const uint8_t* row = static_cast<const uint8_t*>(t.x) + r * t.x_stride * bytes_of(t.type);
    t.x_scale[r] = 1.0f / lift_of_finite(greatest_bits(t.type, row, t.k));
  }
}

// The last columns of blocks of row r, unquantized.
static void pack_numbers(const BlockSparse& t, int64_t r, const uint8_t* row, uint8_t* out) {
  const F lift = splat(t.x_scale ? 1.0f / t.x_scale[r] : 1.0f);
  const Element to = t.mode == Mode::f32 ? Element::f32 : Element::bf16;
  for (int64_t k = t.x_direct * t.side; k < t.column_blocks * t.side; k += 16, out += 16 * bytes_of(to)) {
    const int64_t rest = t.k - k;
    const int count = rest < 0 ? 0 : rest < 16 ? static_cast<int>(rest) : 16;
    store_as(to, out, mul(load_as(t.type, row + k * bytes_of(t.type), count), lift), 16);
  }
}

// All of a row as codes, with the sum of those of each column of blocks.
static void pack_codes(const BlockSparse& t, int64_t r, const uint8_t* row, uint8_t* out) {
  Linear activations{};
  activations.type = t.type, activations.k = t.k, activations.act = t.act;
  RowPacker packer{activations, row, splat(1.0f), 0.0f, false};
  float scale;
  t.x_scale[r] = choose(activations, row, scale, packer.zero_point);
  packer.scale = splat(scale);
  for (int64_t c = 0; c < t.column_blocks; ++c) {
    I total = splat_int(0);
    for (int64_t k = c * t.side; k < (c + 1) * t.side; k += 16, out += 16) {
      const int64_t rest = t.k - k;
      const I codes = rest <= 0 ? splat_int(0) : round_to_int(packer.values(k, rest < 16 ? static_cast<int>(rest) : 16));
      store_bytes(out, codes);
      total = add(total, codes);
    }
    t.x_sums[r * t.column_blocks + c] = sum_of(total);
  }
}

static void pack_activations(const BlockSparse& t, int64_t begin, int64_t end) {
  const int64_t stride = (t.column_blocks - t.x_direct) * t.side * bytes_of(t.mode);
  for (int64_t r = begin; r < end; ++r) {
    const uint8_t* row = static_cast<const uint8_t*>(t.x) + r * t.x_stride * bytes_of(t.type);
    if (t.mode == Mode::int8) {
      pack_codes(t, r, row, t.x_packed + r * stride);
    } else {
      pack_numbers(t, r, row, t.x_packed + r * stride);
    }
  }
}

}  // namespace ao::AO_ISA
