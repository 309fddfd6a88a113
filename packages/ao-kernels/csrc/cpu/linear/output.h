// The output of some rows and blocks of N.
#pragma once
#include "scales.h"

namespace ao::AO_ISA {

static void write_rows(const Linear& t, Rows rows, int64_t block, int64_t blocks, const float* totals) {
  const int size = bytes_of(t.type);
  for (int64_t c = 0; c < blocks; ++c) {
    const int64_t column = (block + c) * 16;
    const int count = t.n - column < 16 ? static_cast<int>(t.n - column) : 16;
    const F bias = t.bias ? load_as(t.type, static_cast<const uint8_t*>(t.bias) + column * size, count) : zero();
    const bool counts = t.act == Act::uint8 && t.mode == Mode::int8;
    const F rowsum = counts ? load(t.rowsum + column) : zero();
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      F v = load(totals + ((r - rows.begin) * kPanelBlocks + c) * 16);
      if (counts) v = fma(splat(-t.x_zero[r]), rowsum, v);
      v = mul(v, splat(t.x_scale[r]));
      if (t.bias) v = add(v, bias);
      store_as(t.type, static_cast<uint8_t*>(t.y) + (r * t.y_stride + column) * size, v, count);
    }
  }
}

}  // namespace ao::AO_ISA
