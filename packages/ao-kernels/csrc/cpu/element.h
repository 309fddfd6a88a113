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

}  // namespace ao
