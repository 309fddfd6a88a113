// Dense matrices to blocks of codes.
#pragma once
#include "bits.h"
#include "scales.h"

namespace ao::AO_ISA::coding {

// Elements [begin, begin + count) of a row in the domain of codes; affine(group) is of its block.
template <class F>
static inline void divide(const Quantize& q, int64_t row, int64_t begin, int64_t count, const F& affine,
                          float* values) {
  alignas(64) float buffer[kPiece];
  const Blocks& b = q.blocks;
  const float* x = read(q.type, at(q.x, q.type, row * b.k + begin), count, buffer);
  for (int64_t i = 0, group = begin / b.block_k; i < count; ++group) {
    const int64_t last = (group + 1) * b.block_k - begin, stop = last < count ? last : count;
    const auto [scale, zero] = affine(group);
    if (q.zero_kind == ZeroKind::none) {
      for (; i < stop; ++i) values[i] = x[i] / scale;
    } else {
      for (; i < stop; ++i) values[i] = x[i] / scale + zero;
    }
  }
}

// Codes of elements [begin, end) of a row, from a multiple of 8 on.
template <class F>
static inline void encode_run(const Quantize& q, int64_t row, int64_t begin, int64_t end,
                              const F& affine) {
  alignas(64) float values[kPiece];
  alignas(64) uint8_t codes[kPiece];
  for (; begin < end; begin += kPiece) {
    const int64_t count = begin + kPiece < end ? kPiece : end - begin;
    divide(q, row, begin, count, affine, values);
    uint8_t* out = q.codes + row * q.row_bytes + begin * q.code_bits / 8;
    if (q.code_bits == 8) {
      encode_values(q.format, values, count, out);
    } else {
      encode_values(q.format, values, count, codes);
      pack_codes(codes, count, q.code_bits, out);
    }
  }
}

static inline KeyRange range_of_group(const Quantize& q, int64_t row, int64_t begin, int64_t end) {
  const bool signs = q.zero_kind != ZeroKind::none;
  return range_of(q.type, at(q.x, q.type, row * q.blocks.k + begin), end - begin, signs);
}

// Blocks of one row: scales, and run(row, begin, end, affine) while the elements are in the cache.
template <class Run>
static inline void for_chosen(const Quantize& q, int64_t begin, int64_t end, const Run& run) {
  BlockQParams affine[kChunkGroups];
  const Blocks& b = q.blocks;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / q.chunks, first = item % q.chunks * q.chunk_groups;
    const int64_t groups = first + q.chunk_groups < b.groups ? q.chunk_groups : b.groups - first;
    const int64_t place = scale_row(b, row) + first, from = first * b.block_k;
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t start = from + i * b.block_k;
      const int64_t stop = start + b.block_k < b.k ? start + b.block_k : b.k;
      affine[i] = choose(q, range_of_group(q, row, start, stop), place + i);
    }
    const int64_t to = from + groups * b.block_k < b.k ? from + groups * b.block_k : b.k;
    run(row, from, to, [&](int64_t group) { return affine[group - first]; });
  }
}

// The same with scales and zero points that there are already.
template <class Run>
static inline void for_given(const Quantize& q, int64_t begin, int64_t end, const Run& run) {
  const Blocks& b = q.blocks;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / q.chunks, from = item % q.chunks * kChunk;
    const int64_t place = scale_row(b, row);
    run(row, from, from + kChunk < b.k ? from + kChunk : b.k, [&](int64_t group) {
      return BlockQParams{load_scale(q.scale, q.scale_type, place + group),
                          load_zero(q.zero, q.zero_type, place + group, q.format.table, 0)};
    });
  }
}

static inline void quantize_fused(const Quantize& q, int64_t begin, int64_t end) {
  for_chosen(q, begin, end, [&](int64_t row, int64_t from, int64_t to, const auto& affine) {
    encode_run(q, row, from, to, affine);
  });
}

static inline void quantize_encode(const Quantize& q, int64_t begin, int64_t end) {
  for_given(q, begin, end, [&](int64_t row, int64_t from, int64_t to, const auto& affine) {
    encode_run(q, row, from, to, affine);
  });
}

static inline void quantize_ranges(const Quantize& q, int64_t begin, int64_t end) {
  const Blocks& b = q.blocks;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / q.shares / b.groups, group = item / q.shares % b.groups;
    const int64_t from = group * b.block_k + item % q.shares * kShare;
    int64_t to = (group + 1) * b.block_k < b.k ? (group + 1) * b.block_k : b.k;
    to = from + kShare < to ? from + kShare : to;
    q.ranges[item] = from < to ? range_of_group(q, row, from, to)
                               : empty_range(q.zero_kind != ZeroKind::none);
  }
}

// Calls f(range, place of its scale) with every block of bands [begin, end).
template <class F>
static inline void for_blocks(const Quantize& q, int64_t begin, int64_t end, const F& f) {
  const Blocks& b = q.blocks;
  for (int64_t band = begin; band < end; ++band) {
    const int64_t top = band % b.bands * b.block_n;
    const int64_t rows = top + b.block_n < b.n ? b.block_n : b.n - top;
    const int64_t first = band / b.bands * b.n + top;
    for (int64_t group = 0; group < b.groups; ++group) {
      KeyRange range = empty_range(q.zero_kind != ZeroKind::none);
      for (int64_t row = first; row < first + rows; ++row) {
        const KeyRange* shares = q.ranges + (row * b.groups + group) * q.shares;
        for (int64_t s = 0; s < q.shares; ++s) range = join(range, shares[s]);
      }
      f(range, band * b.groups + group);
    }
  }
}

static inline void quantize_scales(const Quantize& q, int64_t begin, int64_t end) {
  for_blocks(q, begin, end, [&](KeyRange range, int64_t place) { choose(q, range, place); });
}

static inline void quantize_absmax(const Quantize& q, int64_t begin, int64_t end) {
  for_blocks(q, begin, end, [&](KeyRange range, int64_t place) {
    static_cast<float*>(q.scale)[place] = number_of(q.type, range.high);
  });
}

}  // namespace ao::AO_ISA::coding
