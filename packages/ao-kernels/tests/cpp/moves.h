// What simd/avx512.h makes of AVX-512 BW where there is neither VBMI nor BF16: 64 bytes, 32 bfloat16 or 16 floats at a
// time. Defined by on_avx512_vnni.cpp.
#pragma once
#include <stdint.h>

namespace ao::test {

struct Moves {
  void (*bytes_at)(const uint8_t* index, const uint8_t* table, int size, uint8_t* out);  // size: 64, 128 or 256
  void (*bits_from)(const uint8_t* first, const uint8_t* v, uint8_t* out);
  void (*join_bf16)(const float* v, uint16_t* out);
  void (*pair_rounded)(const float* v, uint16_t* out);  // of each lane and the one 16 later
  void (*dot_pairs)(const float* acc, const uint16_t* w, const uint16_t* x, float* out);
};

extern const Moves kMoves;

}  // namespace ao::test
