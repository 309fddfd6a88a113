// Numbers to codes and back in one pass: what a dense matrix is as a format rounds it.
#pragma once
#include "blocks.h"
#include "decode.h"

namespace ao::AO_ISA::coding {

// Elements [begin, end) of a row; affine(group) is of its block.
template <class F>
static inline void round_run(const Quantize& q, int64_t row, int64_t begin, int64_t end, const F& affine) {
  alignas(64) float values[kPiece];
  alignas(64) uint8_t codes[kPiece];
  const Blocks& b = q.blocks;
  for (; begin < end; begin += kPiece) {
    const int64_t count = begin + kPiece < end ? kPiece : end - begin;
    divide(q, row, begin, count, affine, values);
    encode_values(q.format, values, count, codes);
    decode_values(q.format, codes, count, values);
    for (int64_t i = 0, group = begin / b.block_k; i < count; ++group) {
      const int64_t last = (group + 1) * b.block_k - begin, stop = last < count ? last : count;
      const auto [scale, zero] = affine(group);
      if (q.zero_kind == ZeroKind::none) {
        for (; i < stop; ++i) values[i] *= scale;
      } else {
        for (; i < stop; ++i) values[i] = (values[i] - zero) * scale;
      }
    }
    write(q.type, values, count, at(q.y, q.type, row * b.k + begin));
  }
}

static inline void round_fused(const Quantize& q, int64_t begin, int64_t end) {
  for_chosen(q, begin, end, [&](int64_t row, int64_t from, int64_t to, const auto& affine) {
    round_run(q, row, from, to, affine);
  });
}

static inline void round_blocks(const Quantize& q, int64_t begin, int64_t end) {
  for_given(q, begin, end, [&](int64_t row, int64_t from, int64_t to, const auto& affine) {
    round_run(q, row, from, to, affine);
  });
}

}  // namespace ao::AO_ISA::coding
