// A step of an optimizer, block by block; included by the unit of an instruction set.
#pragma once
#if defined(__AVX512BW__)
#include "avx512.h"
#else
#include "portable.h"
#endif
#include "lion.h"
#include "philox.h"

namespace ao::AO_ISA::optim {

// Blocks that are worked on together, so that what depends on one number of a block does not wait alone. More
// of them would leave the memory idle for longer, while they are encoded.
constexpr int kTogether = 2;

// New moments of a block, and where their codes and scales go.
struct Moments {
  Numbers m, v;
  int count;
  uint8_t *m_codes, *v_codes;
  float *m_scale, *v_scale;
};

static inline float scale_of(const StateFormat& f, const Numbers& of) {
  return stored_scale(as_float(of.greatest) * of.unit, f.reach, f.of_zeros);
}

static inline void store_codes(const StateFormat& f, Numbers& moment, float scale, int count, uint8_t* codes) {
  alignas(64) uint8_t block[kBlock];
  uint8_t* out = count == kBlock ? codes : block;
  if (scale == scale) {
    encode(f, moment, scale, out);
  } else {
    __builtin_memset(out, f.nan_code, kBlock);
  }
  if (out != codes) __builtin_memcpy(codes, out, static_cast<size_t>(count));
}

static inline uint32_t greatest_of(const float* moment, int count) {
  uint32_t greatest = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of(moment[i]) & 0x7fffffff;
    greatest = magnitude > greatest ? magnitude : greatest;
  }
  return greatest;
}

static inline void prefetch(const void* from, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// New moments and parameters of a block of tensor number `number`.
template <Element kType, class S>
static inline void advance_block(const S& s, const StepTensor& t, int64_t number, int64_t block, Moments& out) {
  constexpr int kBytes = bytes_of(kType);
  constexpr bool kTwo = S::kHasSecond;
  const int64_t from = block * kBlock;
  out.count = t.count - from < kBlock ? static_cast<int>(t.count - from) : kBlock;
  out.m_codes = t.m + from, out.m_scale = t.m_scale + block;
  if constexpr (kTwo) out.v_codes = t.v + from, out.v_scale = t.v_scale + block;
  if (const int64_t next = from + kAhead * kBlock; kAhead > 0 && next + kBlock <= t.count) {
    prefetch(static_cast<const char*>(t.p) + next * kBytes, kBlock * kBytes);
    prefetch(static_cast<const char*>(t.g) + next * kBytes, kBlock * kBytes);
    prefetch(t.m + next, kBlock);
    if constexpr (kTwo) prefetch(t.v + next, kBlock);
  }
  uint32_t noise[kBlock];
  if (s.stochastic) random_bits(s.seed, static_cast<uint64_t>(number), static_cast<uint64_t>(from), noise);
  Piece piece{static_cast<uint8_t*>(t.p) + from * kBytes,
              static_cast<const uint8_t*>(t.g) + from * kBytes,
              out.m_codes,
              kTwo ? out.v_codes : nullptr,
              *out.m_scale,
              kTwo ? *out.v_scale : 0,
              s.stochastic ? noise : nullptr};
  if (out.count == kBlock) {
    advance<kType>(s, piece, out.m, out.v);
    return;
  }
  // a shorter one is worked on in a copy
  alignas(64) uint8_t p[kBytes * kBlock] = {}, g[kBytes * kBlock] = {}, m_codes[kBlock] = {}, v_codes[kBlock] = {};
  const size_t codes = static_cast<size_t>(out.count), bytes = codes * kBytes;
  void* to = piece.p;
  __builtin_memcpy(p, piece.p, bytes);
  __builtin_memcpy(g, piece.g, bytes);
  __builtin_memcpy(m_codes, piece.m_codes, codes);
  piece.p = p, piece.g = g, piece.m_codes = m_codes;
  if constexpr (kTwo) {
    __builtin_memcpy(v_codes, piece.v_codes, codes);
    piece.v_codes = v_codes;
  }
  advance<kType>(s, piece, out.m, out.v);
  out.m.greatest = greatest_of(out.m.values, out.count);
  if constexpr (kTwo) out.v.greatest = greatest_of(out.v.values, out.count);
  __builtin_memcpy(to, p, bytes);
}

template <class S>
static inline void step_blocks(const S& s, int64_t begin, int64_t end) {
  int64_t low = 0, high = s.size;  // the last tensor that does not begin beyond the first block
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (s.tensors[middle].first <= begin ? low : high) = middle;
  }
  Moments moments[kTogether];
  while (begin < end) {
    int count = 0;
    for (; count < kTogether && begin < end; ++count, ++begin) {
      while (begin >= s.tensors[low].first + (s.tensors[low].count + kBlock - 1) / kBlock) ++low;
      const StepTensor& t = s.tensors[low];
      if (s.type == Element::f32) {
        advance_block<Element::f32>(s, t, low, begin - t.first, moments[count]);
      } else {
        advance_block<Element::bf16>(s, t, low, begin - t.first, moments[count]);
      }
    }
    for (int i = 0; i < count; ++i) {
      const Moments& of = moments[i];
      *of.m_scale = scale_of(s.m, of.m);
      if constexpr (S::kHasSecond) *of.v_scale = scale_of(s.v, of.v);
    }
    for (int i = 0; i < count; ++i) {
      Moments& of = moments[i];
      store_codes(s.m, of.m, *of.m_scale, of.count, of.m_codes);
      if constexpr (S::kHasSecond) store_codes(s.v, of.v, *of.v_scale, of.count, of.v_codes);
    }
  }
}

constexpr OptimKernels kOptimKernels = {.adam = step_blocks<Adam>, .lion = step_blocks<Lion>};

}  // namespace ao::AO_ISA::optim
