// Scales and zero points of weights in tiles, checked.
#pragma once

#include <vector>

#include "formats.h"

namespace ao {

using Optional = std::optional<Tensor>;

// The arguments of ops, in their order.
struct QuantParamTensors {
  const Tensor& scale;
  const Optional &scale_outer, &zero, &offset, &offset_outer;
  int64_t span;
};

inline ScaleView read_scales(const char* name, const Tensor& values, const char* outer_name, const Optional& outer,
                          int64_t rows, const QuantParams& t, std::vector<Tensor>& kept) {
  ScaleView scales{};
  scales.type = tile_scale_of(name, values);
  check_numel(name, values, rows * t.groups, "one per row of every block and group");
  kept.push_back(readable(name, values));
  scales.values = kept.back().const_data_ptr();
  if (outer) {
    scales.outer_type = scale_of(outer_name, *outer);
    check_numel(outer_name, *outer, rows * t.spans, "one per row of every block and span of groups");
    kept.push_back(readable(outer_name, *outer));
    scales.outer = kept.back().const_data_ptr();
  }
  return scales;
}

// `rows`: of all blocks. `t.groups` is set; `kept` keeps the memory that `t` points to.
inline void read_quant_params(const QuantParamTensors& given, int64_t rows, QuantParams& t, std::vector<Tensor>& kept) {
  check_range("span", given.span, 1, t.groups);
  t.span = given.span, t.spans = (t.groups + given.span - 1) / given.span;
  t.scale = read_scales("scale", given.scale, "scale_outer", given.scale_outer, rows, t, kept);
  t.zero_type = Zero::none;
  if (given.zero) {
    t.zero_type = zero_of("zero_point", *given.zero);
    check_numel("zero_point", *given.zero, rows * t.groups, "as many as scales");
    kept.push_back(readable("zero_point", *given.zero));
    t.zero = kept.back().const_data_ptr();
  }
  AO_CHECK(given.offset || !given.offset_outer, "offset_outer: multiplies `offset`, which is None");
  if (given.offset) {
    AO_CHECK(!given.zero, "offset: comes in the place of `zero_point`; one of them must be None");
    t.zero_type = Zero::scaled;
    t.offset = read_scales("offset", *given.offset, "offset_outer", given.offset_outer, rows, t, kept);
  }
}

// Those of the blocks from block `first` on.
inline ScaleView from_block(ScaleView s, int64_t first, const QuantParams& t) {
  s.values = static_cast<const uint8_t*>(s.values) + first * t.groups * 16 * bytes_of(s.type);
  if (s.outer) s.outer = static_cast<const uint8_t*>(s.outer) + first * t.spans * 16 * bytes_of(s.outer_type);
  return s;
}
inline void to_block(QuantParams& t, int64_t first) {
  t.scale = from_block(t.scale, first, t);
  if (t.offset.values) t.offset = from_block(t.offset, first, t);
  if (t.zero) t.zero = static_cast<const uint8_t*>(t.zero) + first * t.groups * 16 * bytes_of(t.zero_type);
}

}  // namespace ao
