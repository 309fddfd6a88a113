// Viterbi's algorithm for rings of codes; included by the unit of an instruction set.
//
// States are numbered with the newest code at the bottom: (older codes, newest code). States whose lower bits agree
// lead to the same states, so of each of these lower bits only the least cost is kept. Sums are in float32, in one
// order, without fused operations: all instruction sets find the codes of the reference.
#pragma once
#include "kernels.h"

namespace ao::AO_ISA::trellis {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Costs __attribute__((vector_size(4 * kLanes)));
typedef int32_t Origins __attribute__((vector_size(4 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

AO_INLINE Costs load_costs(const float* p) {
  Costs v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
// kLanes / 2^kBits of them, each as often as states share it.
template <int kBits>
AO_INLINE Costs spread(const float* p) {
  constexpr int kValues = kLanes >> kBits;
  if constexpr (kValues <= 1) {
    return Costs{} + p[0];
  } else {
    const Costs v = load_costs(p);
#if defined(__AVX512F__)
    if constexpr (kBits == 3) return __builtin_shufflevector(v, v, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return __builtin_shufflevector(v, v, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
#elif defined(__AVX2__)
    return __builtin_shufflevector(v, v, 0, 0, 0, 0, 1, 1, 1, 1);
#else
    return v;  // there are 1 of 4 lanes
#endif
  }
}

// One place: from the costs `best` to `next`, with the oldest code of the best state of each.
template <int kBits, bool kMatters>
static inline void step(const float* values, float x, const float* best, float* next, uint8_t* oldest) {
  constexpr int kShared = kStates >> kBits;
  const Costs wanted = Costs{} + x;
  for (int low = 0; low < kShared; low += kLanes) {
    Costs least{};
    Origins from{};
#pragma GCC unroll 16
    for (int code = 0; code < 1 << kBits; ++code) {
      const int state = code * kShared + low;
      Costs cost = spread<kBits>(best + (state >> kBits));
      if constexpr (kMatters) {
        const Costs far = wanted - load_costs(values + state);
        cost = far * far + cost;
      }
      if (code == 0) {
        least = cost;
        continue;
      }
      const Origins less = cost < least;
      least = less ? cost : least;
      from = less ? Origins{} + code : from;
    }
    __builtin_memcpy(next + low, &least, sizeof least);
    const Bytes bytes = __builtin_convertvector(from, Bytes);
    __builtin_memcpy(oldest + low, &bytes, sizeof bytes);
  }
}

// The memory of a thread.
struct SearchSpace {
  float *best, *next;  // costs, 16 more than there are
  float* x;
  uint16_t* states;
  uint8_t* oldest;  // (places, shared)

  // Each part begins at a multiple of 64.
  static int64_t bytes(int64_t places, int bits) {
    const int64_t shared = kStates >> bits;
    return 2 * 4 * (shared + 16) + places * (4 + 2 + shared) + 5 * 64;
  }
  SearchSpace(uint8_t* at, int64_t places, int bits) {
    const int64_t shared = kStates >> bits;
    const auto take = [&at](int64_t size) {
      uint8_t* const found = at;
      at += (size + 63) / 64 * 64;
      return found;
    };
    best = reinterpret_cast<float*>(take(4 * (shared + 16)));
    next = reinterpret_cast<float*>(take(4 * (shared + 16)));
    x = reinterpret_cast<float*>(take(4 * places));
    states = reinterpret_cast<uint16_t*>(take(2 * places));
    oldest = at;
  }
};

// States of the nearest path for x, place i being turn + i of the ring; one from `seam` to `seam` unless that is -1.
template <int kBits>
static inline void find_path(const TrellisSearch& t, const float* x, int64_t turn, int64_t seam, SearchSpace& space) {
  constexpr int64_t kShared = kStates >> kBits;
  for (int64_t i = 0; i < kShared + 16; ++i) {
    space.best[i] = seam < 0 || i == seam ? 0.0f : __builtin_inff();
    space.next[i] = 0.0f;
  }
  for (int64_t i = 0; i < t.places; ++i) {
    const int64_t place = turn + i < t.places ? turn + i : turn + i - t.places;
    uint8_t* const oldest = space.oldest + i * kShared;
    if (place < t.count) {
      step<kBits, true>(t.values, x[place], space.best, space.next, oldest);
    } else {
      step<kBits, false>(t.values, 0.0f, space.best, space.next, oldest);
    }
    float* const swapped = space.best;
    space.best = space.next, space.next = swapped;
  }
  int64_t now = seam;
  if (seam < 0) {
    now = 0;
    for (int64_t i = 1; i < kShared; ++i) now = space.best[i] < space.best[now] ? i : now;
  }
  for (int64_t i = t.places - 1; i >= 0; --i) {
    const int64_t state = space.oldest[i * kShared + now] * kShared + now;
    space.states[i] = static_cast<uint16_t>(state);
    now = state >> kBits;
  }
}

template <int kBits>
static inline void search_rings(const TrellisSearch& t, int64_t begin, int64_t end, uint8_t* scratch) {
  constexpr float kFar = 1e4f;
  constexpr int64_t kShared = kStates >> kBits;
  SearchSpace space(scratch, t.places, kBits);
  const int64_t half = t.places / 2;
  for (int64_t ring = begin; ring < end; ++ring) {
    for (int64_t i = 0; i < t.places; ++i) {
      const float x = t.x[ring * t.places + i];
      space.x[i] = x != x ? 0.0f : x > kFar ? kFar : x < -kFar ? -kFar : x;
    }
    find_path<kBits>(t, space.x, half, -1, space);
    find_path<kBits>(t, space.x, 0, space.states[half - 1] & (kShared - 1), space);
    for (int64_t i = 0; i < t.places; ++i) {
      t.codes[ring * t.places + i] = static_cast<uint8_t>(space.states[i] & ((1 << kBits) - 1));
    }
  }
}

static inline void search(const TrellisSearch& t, int64_t begin, int64_t end, uint8_t* scratch) {
  if (t.bits == 2) return search_rings<2>(t, begin, end, scratch);
  if (t.bits == 3) return search_rings<3>(t, begin, end, scratch);
  search_rings<4>(t, begin, end, scratch);
}
static inline int64_t search_scratch(const TrellisSearch& t) { return SearchSpace::bytes(t.places, t.bits); }

}  // namespace ao::AO_ISA::trellis
