// Compiled with the flags of that instruction set, and like its unit without headers of the C++ standard library.
#include "moves.h"

#if defined(__AVX512BW__)
#define AO_ISA avx512_vnni
#include "simd/avx512_vnni.h"

#if defined(__AVX512VBMI__) || defined(__AVX512BF16__)
#error "these flags leave nothing to test"
#endif

namespace ao::test {
namespace {

using namespace avx512_vnni;

void bytes_at_of(const uint8_t* index, const uint8_t* table, int size, uint8_t* out) {
  const I at = load_vector(index);
  I parts[4];
  for (int i = 0; i < size / 64; ++i) parts[i] = load_vector(table + 64 * i);
  store_vector(out, size == 64    ? bytes_at(at, parts[0])
                    : size == 128 ? bytes_at(at, parts[0], parts[1])
                                  : bytes_at(at, parts));
}
void bits_from_of(const uint8_t* first, const uint8_t* v, uint8_t* out) {
  store_vector(out, bits_from(load_vector(first), load_vector(v)));
}
void join_bf16_of(const float* v, uint16_t* out) { store_vector(out, join_bf16(load(v), load(v + 16))); }
void pair_rounded_of(const float* v, uint16_t* out) { store_vector(out, pair_rounded(load(v), load(v + 16))); }
void dot_pairs_of(const float* acc, const uint16_t* w, const uint16_t* x, float* out) {
  store(out, dot_pairs(load(acc), load_vector(w), load_vector(x)));
}

}  // namespace

const Moves kMoves = {bytes_at_of, bits_from_of, join_bf16_of, pair_rounded_of, dot_pairs_of};

}  // namespace ao::test
#endif
