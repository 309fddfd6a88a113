// A CPU as `linear.h` sees it, in the place of csrc/cuda/machine.h: a warp is a thread, a number per lane is an array of 32.
// Copies happen as late as they may: when a wait says that they are done. Until then the memory holds NaN.
#pragma once

#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <memory>
#include <vector>

#include "fragments.h"
#include "params.h"

#define AO_DEVICE inline

namespace ao::gpu {

constexpr int kLanes = 32;

template <class T>
struct Lanes {
  T v[kLanes];
  Lanes() = default;
  explicit Lanes(T value) {
    for (T& lane : v) lane = value;
  }
  template <class F>
  static Lanes of(F f) {
    Lanes out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = f(i);
    return out;
  }
};
struct U32 : Lanes<uint32_t> {
  U32() = default;
  template <class T>
  U32(T value) : Lanes(static_cast<uint32_t>(value)) {}
  U32(const Lanes& lanes) : Lanes(lanes) {}
};
using F32 = Lanes<float>;
using Bool = Lanes<bool>;

#define AO_BINARY(Result, Operand, op) \
  inline Result operator op(const Operand& a, const Operand& b) { return Result::of([&](int i) { return a.v[i] op b.v[i]; }); }
AO_BINARY(Lanes<uint32_t>, U32, +)
AO_BINARY(Lanes<uint32_t>, U32, -)
AO_BINARY(Lanes<uint32_t>, U32, *)
AO_BINARY(Lanes<uint32_t>, U32, &)
AO_BINARY(Lanes<uint32_t>, U32, |)
AO_BINARY(Lanes<uint32_t>, U32, ^)
AO_BINARY(Bool, U32, <)
AO_BINARY(F32, F32, +)
AO_BINARY(F32, F32, -)
AO_BINARY(F32, F32, *)
#undef AO_BINARY
inline Bool operator&(const Bool& a, const Bool& b) { return Bool::of([&](int i) { return a.v[i] && b.v[i]; }); }
inline U32 operator<<(const U32& a, int by) { return U32::of([&](int i) { return a.v[i] << by; }); }
inline U32 operator>>(const U32& a, int by) { return U32::of([&](int i) { return a.v[i] >> by; }); }

inline int least(int a, int b) { return a < b ? a : b; }
inline int greatest(int a, int b) { return a < b ? b : a; }
inline int log2_of(int value) { return std::bit_width(static_cast<unsigned>(value)) - 1; }
inline U32 smaller(const U32& a, const U32& b) { return U32::of([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline U32 larger(const U32& a, const U32& b) { return U32::of([&](int i) { return a.v[i] < b.v[i] ? b.v[i] : a.v[i]; }); }
inline U32 choose(const Bool& which, const U32& a, const U32& b) {
  return U32::of([&](int i) { return which.v[i] ? a.v[i] : b.v[i]; });
}
inline U32 masked_or(const U32& a, const U32& mask, const U32& other) { return (a & mask) | other; }
inline U32 masked_xor(const U32& a, const U32& mask, const U32& other) { return (a & mask) ^ other; }
inline F32 fma(const F32& a, const F32& b, const F32& c) {
  return F32::of([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}

// What a warp knows of itself; CTAs of a cluster, and what they share.
struct Cluster {
  std::vector<std::unique_ptr<uint8_t[]>> shared;  // of each CTA
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  std::barrier<> all;
  Cluster(int ctas, int bytes) : all(ctas * kWarps) {
    for (int i = 0; i < ctas; ++i) {
      shared.emplace_back(new uint8_t[bytes]);
      std::memset(shared.back().get(), 0xff, bytes);  // NaN
      barriers.emplace_back(new std::barrier<>(kWarps));
    }
  }
};
using Copy = std::function<void()>;
struct Self {
  int warp, x, y;
  Cluster* cluster;
  std::vector<Copy> open;                          // copies that are not committed
  std::vector<std::vector<Copy>> committed;        // those that are not done
  std::vector<std::pair<uint64_t*, Copy>> pieces;  // copies in bulk
};
inline thread_local Self* self = nullptr;

inline U32 lane_index() { return U32::of([](int i) { return uint32_t(i); }); }
inline int warp_index() { return self->warp; }
inline int cta_x() { return self->x; }
inline int cta_y() { return self->y; }
inline int ctas_y() { return int(self->cluster->shared.size()); }

// bfloat16 and float16, by the compiler's float16 and by rounding to nearest even
inline float float_of_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
inline uint16_t bf16_of(double exact) {
  // to odd in float32 first, so that rounding twice is like rounding once
  float near = static_cast<float>(exact);
  uint32_t bits = std::bit_cast<uint32_t>(near);
  if (near != near) return 0x7fff;
  if (near != exact) {
    if (std::fabs(near) > std::fabs(exact)) --bits;
    bits |= 1;
  }
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float float_of_f16(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
inline uint16_t f16_of(double exact) { return std::bit_cast<uint16_t>(static_cast<_Float16>(exact)); }

template <float (*to)(uint16_t), uint16_t (*from)(double)>
struct Element {
  static U32 fma(const U32& a, const U32& b, const U32& c) {
    return U32::of([&](int i) {
      uint32_t out = 0;
      for (int half = 0; half < 32; half += 16) {
        const double product = double(to(uint16_t(a.v[i] >> half))) * to(uint16_t(b.v[i] >> half));
        out |= uint32_t(from(product + to(uint16_t(c.v[i] >> half)))) << half;
      }
      return out;
    });
  }
  static void mma(F32 (&d)[4], const U32 (&a)[4], const U32& b0, const U32& b1) {
    float left[16][16], right[16][8];
    const U32* b[2] = {&b0, &b1};
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 8; ++i) left[row_of_a(lane, i)][column_of_a(lane, i)] = to(uint16_t(a[i / 2].v[lane] >> i % 2 * 16));
      for (int i = 0; i < 4; ++i) right[row_of_b(lane, i)][column_of_b(lane, i)] = to(uint16_t(b[i / 2]->v[lane] >> i % 2 * 16));
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        double total = d[i].v[lane];
        for (int k = 0; k < 16; ++k) total += double(left[row_of_c(lane, i)][k]) * right[k][column_of_c(lane, i)];
        d[i].v[lane] = static_cast<float>(total);
      }
    }
  }
  static uint16_t rounded(float value) { return from(value); }
  static float value(uint16_t bits) { return to(bits); }
};
struct Bf16 : Element<float_of_bf16, bf16_of> {
  static constexpr Number number = Number::bf16;
  static constexpr int mantissa = 7;
  static constexpr uint32_t ones = 0x3f803f80, times_float8 = 0x7b807b80;
};
struct Fp16 : Element<float_of_f16, f16_of> {
  static constexpr Number number = Number::f16;
  static constexpr int mantissa = 10;
  static constexpr uint32_t ones = 0x3c003c00, times_float8 = 0x5c005c00;
};

template <class T>
T read(const void* base, uint64_t at) {
  T out;
  std::memcpy(&out, static_cast<const uint8_t*>(base) + at, sizeof(T));
  return out;
}
inline float number_at(const void* base, uint64_t index, Number type) {
  if (type == Number::f32) return read<float>(base, 4 * index);
  const auto bits = read<uint16_t>(base, 2 * index);
  return type == Number::bf16 ? float_of_bf16(bits) : float_of_f16(bits);
}

inline void expect_aligned(uint64_t at, uint64_t bytes) {
  if (at % bytes) throw std::runtime_error("an address is not aligned");
}
inline void load128(U32 (&out)[4], const uint8_t* base, const U32& at) {
  for (int i = 0; i < kLanes; ++i) {
    expect_aligned(at.v[i], 16);
    for (int q = 0; q < 4; ++q) out[q].v[i] = read<uint32_t>(base, at.v[i] + 4 * q);
  }
}
inline U32 load32(const uint8_t* base, const U32& at) {
  return U32::of([&](int i) { return expect_aligned(at.v[i], 4), read<uint32_t>(base, at.v[i]); });
}
inline void store128(float* base, const U32& at, const F32 (&in)[4]) {
  for (int i = 0; i < kLanes; ++i) {
    expect_aligned(at.v[i], 4);
    for (int q = 0; q < 4; ++q) base[at.v[i] + q] = in[q].v[i];
  }
}
inline F32 load_shared(const float* base, const U32& at, const Bool& inside) {
  return F32::of([&](int i) { return inside.v[i] ? base[at.v[i]] : 0.f; });
}
inline void store_shared(float* base, const U32& at, const F32& value, const Bool& inside) {
  for (int i = 0; i < kLanes; ++i) {
    if (inside.v[i]) base[at.v[i]] = value.v[i];
  }
}
inline void load_numbers(F32 (&out)[4], const uint8_t* base, const U32& at, Number type) {
  const int size = bytes_of(type);
  for (int i = 0; i < kLanes; ++i) {
    expect_aligned(at.v[i], 4 * size);
    for (int q = 0; q < 4; ++q) out[q].v[i] = number_at(base + at.v[i], q, type);
  }
}
inline F32 load_global(const void* base, const U32& at, Number type, const Bool& inside) {
  return F32::of([&](int i) { return inside.v[i] ? number_at(base, at.v[i], type) : 0.f; });
}
template <class E>
void store_global(void* base, const U32& row, const U32& stride, const U32& at, const F32& value, const Bool& inside) {
  for (int i = 0; i < kLanes; ++i) {
    if (inside.v[i]) static_cast<uint16_t*>(base)[uint64_t(row.v[i]) * stride.v[i] + at.v[i]] = E::rounded(value.v[i]);
  }
}

// Asynchronous copies.
inline void copy16(uint8_t* to, const U32& to_at, const uint8_t* from, const U32& from_at, const U32& bytes, const Bool& active) {
  for (int i = 0; i < kLanes; ++i) {
    if (!active.v[i]) continue;
    uint8_t* const target = to + to_at.v[i];
    const uint8_t* const source = from + from_at.v[i];
    const uint32_t count = bytes.v[i];
    expect_aligned(reinterpret_cast<uint64_t>(target) | reinterpret_cast<uint64_t>(source), 16);
    std::memset(target, 0xff, 16);
    self->open.push_back([=] {
      std::memset(target, 0, 16);
      std::memcpy(target, source, count);
    });
  }
}
inline void commit() {
  self->committed.push_back(std::move(self->open));
  self->open.clear();
}
inline void wait_committed(int count) {
  while (int(self->committed.size()) > count) {
    for (const Copy& copy : self->committed.front()) copy();
    self->committed.erase(self->committed.begin());
  }
}
inline void start_barrier(uint64_t* barrier) { *barrier = 0; }
template <int BYTES>
void copy_piece(uint8_t* to, const uint8_t* from, uint64_t* barrier) {
  expect_aligned(reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from), 16);
  std::memset(to, 0xff, BYTES);
  self->pieces.emplace_back(barrier, [=] {
    std::memcpy(to, from, BYTES);
    ++*barrier;  // another phase has ended
  });
}
inline void wait_piece(uint64_t* barrier, int phase) {
  for (size_t i = 0; i < self->pieces.size(); ++i) {
    if (self->pieces[i].first != barrier) continue;
    self->pieces[i].second();
    self->pieces.erase(self->pieces.begin() + i);
    break;
  }
  // on a device it would go on before the copy is done, or wait for ever
  if (int(*barrier & 1) == phase) throw std::runtime_error("a barrier is asked for the wrong phase");
}
template <int BYTES>
void prefetch_piece(const uint8_t* from) {
  for (int i = 0; i < BYTES; i += 64) static_cast<void>(*const_cast<const volatile uint8_t*>(from + i));
}

inline void launch_dependents() {}
inline void wait_for_kernel_before() {}
inline void sync_threads() { self->cluster->barriers[self->y]->arrive_and_wait(); }
inline void sync_cluster() { self->cluster->all.arrive_and_wait(); }
inline F32 load_cluster(const float* base, const U32& at, int rank, const Bool& inside) {
  const auto& shared = self->cluster->shared;
  const int64_t offset = reinterpret_cast<const uint8_t*>(base) - shared[self->y].get();
  return load_shared(reinterpret_cast<const float*>(shared[rank].get() + offset), at, inside);
}

}  // namespace ao::gpu
