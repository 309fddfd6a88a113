// The types that kernels read and write, as the ops name them.
#pragma once
#include <stdint.h>

namespace ao {

enum class Element : int32_t { f32, bf16, f16 };
// u8, i8: integers, as quantized scales are
enum class Scale : int32_t { f32, bf16, f16, e8m0, e4m3, u8, i8 };
// scaled: taken off after scaling, and stored as scales are
enum class Zero : int32_t { none, u8, f32, bf16, f16, scaled };
// What is known of a format's table: nothing, exact in bfloat16 (<= 6 bits), value = code + table[0],
// or (8 bits) exact in bfloat16 with the top bit as the sign.
enum class Kind : int32_t { table, exact, integer, symmetric };

// Bytes of one. Internal, as all that is compiled for several instruction sets.
static constexpr int bytes_of(Element type) { return type == Element::f32 ? 4 : 2; }
static constexpr int bytes_of(Scale type) {
  return type == Scale::f32 ? 4 : type == Scale::bf16 || type == Scale::f16 ? 2 : 1;
}
static constexpr int bytes_of(Zero type) { return type == Zero::f32 ? 4 : type == Zero::u8 ? 1 : 2; }

// A view of scales (row block, group, 16): one per row of every block and group. Double quantization: those of a span
// of groups are multiplied by one of `outer` (row block, span, 16). Null: there are no outer scales.
struct ScaleView {
  const void* values;
  const void* outer;
  Scale type, outer_type;
};

// Scales and zero points of a weight in tiles. An element is (v - zero) * scale, v being the value of its code; where
// zero points are scaled, it is v * scale - offset.
struct QuantParams {
  ScaleView scale, offset;
  const void* zero;
  Zero zero_type;
  int64_t groups;       // along K
  int64_t span, spans;  // groups that share an outer scale; how many such there are
};

}  // namespace ao
