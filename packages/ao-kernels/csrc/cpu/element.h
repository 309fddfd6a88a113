// The types that kernels read and write, as the ops name them.
#pragma once
#include <stdint.h>

namespace ao {

enum class Element : int32_t { f32, bf16, f16 };
enum class Scale : int32_t { f32, bf16, f16, e8m0, e4m3 };
enum class Zero : int32_t { none, u8, f32, bf16, f16 };
// What is known of a format's table: nothing, exact in bfloat16 (<= 6 bits), value = code + table[0],
// or (8 bits) exact in bfloat16 with the top bit as the sign.
enum class Kind : int32_t { table, exact, integer, symmetric };

// Bytes of one. Internal, as all that is compiled for several instruction sets.
static constexpr int bytes_of(Element type) { return type == Element::f32 ? 4 : 2; }
static constexpr int bytes_of(Scale type) {
  return type == Scale::f32 ? 4 : type == Scale::bf16 || type == Scale::f16 ? 2 : 1;
}
static constexpr int bytes_of(Zero type) { return type == Zero::f32 ? 4 : type == Zero::u8 ? 1 : 2; }

}  // namespace ao
