// Codes to numbers: blocks of a dense matrix, and how far they are from another one.
#pragma once
#include "bits.h"
#include "tables.h"

namespace ao::AO_ISA::coding {

// Values of codes, which are below 1 << bits.
static inline void decode_values(const Format& f, const uint8_t* codes, int64_t count, float* out) {
  if (!f.is_integer) return look_up(f.table, f.bits, codes, count, out);
  const int32_t top = f.least < 0 ? 1 << (f.bits - 1) : 0;
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>((codes[i] ^ top) - top);
}

// Values of codes by the codebook of their block: at most kPiece elements of a row from `begin` on.
static inline void decode_by_codebooks(const Dequantize& d, int64_t row, int64_t begin, int64_t end,
                                       const uint8_t* codes, float* out) {
  const Blocks& b = d.blocks;
  const int bits = d.format.bits, size = 1 << bits;
  const int64_t first = scale_row(b, row);
  alignas(64) float table[256] = {};
  for (int64_t i = begin; i < end;) {
    const int64_t group = i / b.block_k, place = (first + group) * size;
    const int64_t stop = (group + 1) * b.block_k < end ? (group + 1) * b.block_k : end;
    for (int c = 0; c < size; ++c) table[c] = load_scale(d.scale, d.scale_type, place + c);
    look_up(table, bits, codes + (i - begin), stop - i, out + (i - begin));
    i = stop;
  }
}

// (value - zero) * scale of elements [begin, end) of a row, at most kPiece.
static inline void decode_piece(const Dequantize& d, int64_t row, int64_t begin, int64_t end,
                                float* out) {
  alignas(64) uint8_t codes[kPiece];
  const Blocks& b = d.blocks;
  const Format& f = d.format;
  unpack_codes(d.codes + row * d.row_bytes, d.row_bytes, begin, end - begin, d.code_bits, codes);
  if (d.codebooks) return decode_by_codebooks(d, row, begin, end, codes, out);
  decode_values(f, codes, end - begin, out);
  const int64_t scales = scale_row(b, row);
  for (int64_t i = begin; i < end;) {
    const int64_t group = i / b.block_k, place = scales + group;
    const int64_t stop = (group + 1) * b.block_k < end ? (group + 1) * b.block_k : end;
    const float scale = load_scale(d.scale, d.scale_type, place);
    float* v = out + (i - begin);
    const int64_t count = stop - i;
    if (d.zero_type == Zero::none) {
      for (int64_t j = 0; j < count; ++j) v[j] *= scale;
    } else {
      const float zero = load_zero(d.zero, d.zero_type, place, f.table, 0);
      for (int64_t j = 0; j < count; ++j) v[j] = (v[j] - zero) * scale;
    }
    i = stop;
  }
}

static inline void decode_blocks(const Dequantize& d, int64_t begin, int64_t end) {
  alignas(64) float values[kPiece];
  const int64_t k = d.blocks.k;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / d.chunks, from = item % d.chunks * kChunk;
    const int64_t to = from + kChunk < k ? from + kChunk : k;
    for (int64_t i = from; i < to; i += kPiece) {
      const int64_t stop = i + kPiece < to ? i + kPiece : to;
      decode_piece(d, row, i, stop, values);
      write(d.type, values, stop - i, at(d.y, d.type, row * k + i));
    }
  }
}

// Sums of |a|^2 and |a - b|^2 in float64, in lanes that are added up in the end.
typedef double Lanes __attribute__((vector_size(64)));
struct Sums {
  Lanes signal = {}, noise = {};

  void add(const float* a, const float* b, int64_t count) {
    typedef float Floats __attribute__((vector_size(32)));
    Lanes s = signal, n = noise;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      Floats x, y;
      __builtin_memcpy(&x, a + i, 32);
      __builtin_memcpy(&y, b + i, 32);
      const Lanes wide = __builtin_convertvector(x, Lanes);
      const Lanes error = wide - __builtin_convertvector(y, Lanes);
      s += wide * wide;
      n += error * error;
    }
    for (; i < count; ++i) {
      const double wide = a[i], error = wide - b[i];
      s[0] += wide * wide;
      n[0] += error * error;
    }
    signal = s, noise = n;
  }
};

// Sums of every share by itself, so that the total does not depend on the number of threads.
static inline void sum_errors(const Dequantize& d, int64_t begin, int64_t end) {
  alignas(64) float values[kPiece], dense[kPiece];
  alignas(64) uint16_t rounded[kPiece];
  const int64_t k = d.blocks.k;
  for (int64_t item = begin; item < end; ++item) {
    Sums sums;
    const int64_t last = (item + 1) * kShare < d.counted ? (item + 1) * kShare : d.counted;
    for (int64_t i = item * kShare; i < last;) {
      const int64_t element = i / d.run * d.run * d.step + i % d.run;
      const int64_t row = element / k, column = element % k, lead = column % 8;
      int64_t count = kPiece - 8;
      count = k - column < count ? k - column : count;
      count = d.run - i % d.run < count ? d.run - i % d.run : count;
      count = last - i < count ? last - i : count;
      decode_piece(d, row, column - lead, column + count, values);
      const float* approx = values + lead;
      if (d.type != Element::f32) {
        write(d.type, approx, count, rounded);
        approx = read(d.type, rounded, count, values);
      }
      sums.add(read(d.x_type, at(d.x, d.x_type, element), count, dense), approx, count);
      i += count;
    }
    double* out = d.sums + 2 * item;
    out[0] = out[1] = 0;
    for (int j = 0; j < 8; ++j) out[0] += sums.signal[j], out[1] += sums.noise[j];
  }
}

}  // namespace ao::AO_ISA::coding
