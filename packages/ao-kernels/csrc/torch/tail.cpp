// Tokens that are appended to the exact tail of a cache of keys and values.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>

#include "formats.h"

namespace ao {
namespace {

// Rows of tokens [first, tokens) to their slots; `from` holds the last T tokens.
void write_rows(const Tensor& tail, const Tensor& from, int64_t first, int64_t tokens) {
  const int64_t size = from.size(3), new_tokens = from.size(2), slots = tail.size(2);
  const auto bytes = static_cast<size_t>(size * from.element_size());
  const int64_t element = static_cast<int64_t>(from.element_size());
  const Tensor rows = size <= 1 || from.stride(3) == 1 ? from : torch::stable::contiguous(from);
  const auto* const x = static_cast<const uint8_t*>(rows.const_data_ptr());
  auto* const y = static_cast<uint8_t*>(tail.mutable_data_ptr());
  for (int64_t b = 0; b < from.size(0); ++b) {
    for (int64_t h = 0; h < from.size(1); ++h) {
      const uint8_t* const of_head = x + (b * rows.stride(0) + h * rows.stride(1)) * element;
      uint8_t* const to = y + (b * from.size(1) + h) * slots * size * element;
      for (int64_t token = first; token < tokens; ++token) {
        const int64_t place = token - (tokens - new_tokens);
        std::memcpy(to + token % slots * size * element, of_head + place * rows.stride(2) * element, bytes);
      }
    }
  }
}

void check_tail(const char* name, const Tensor& tail, const char* of, const Tensor& from) {
  check_cpu(of, from);
  check_dim(of, from, 4);
  check_cpu(name, tail);
  check_dtype(name, tail, {from.scalar_type()});
  check_dim(name, tail, 4);
  check_shape(name, tail, {from.size(0), from.size(1), tail.size(2), from.size(3)});
  check_contiguous(name, tail);
}

void write_tail_op(const Tensor& counts, const Tensor& tail_key, const Tensor& tail_value, const Tensor& key,
                   const Tensor& value, int64_t coded) {
  element_of("key", key);
  check_tail("tail_key", tail_key, "key", key);
  check_tail("tail_value", tail_value, "value", value);
  const int64_t new_tokens = key.size(2), slots = tail_key.size(2);
  AO_CHECK(value.size(2) == new_tokens && tail_value.size(2) == slots, "value, tail_value: have ", value.size(2),
           " tokens and ", tail_value.size(2), " slots; must have ", new_tokens, " and ", slots, ", as those of keys");
  check_cpu("counts", counts);
  check_dtype("counts", counts, {ScalarType::Long});
  check_shape("counts", counts, {2});
  check_contiguous("counts", counts);
  auto* const both = static_cast<int64_t*>(counts.mutable_data_ptr());
  const int64_t tokens = both[0] + new_tokens;
  coded = std::max(coded, both[1]);
  AO_CHECK(both[0] >= 0 && coded >= 0 && coded <= tokens && tokens - coded <= slots, "counts=[", both[0], ", ", both[1],
           "], coded=", coded, ": with ", new_tokens, " new tokens and ", slots, " slots these are no counts of a cache");
  const int64_t first = std::max(tokens - new_tokens, coded);
  write_rows(tail_key, key, first, tokens);
  write_rows(tail_value, value, first, tokens);
  both[0] = tokens, both[1] = coded;
}

}  // namespace
}  // namespace ao

STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "write_tail(Tensor(a!) counts, Tensor(b!) tail_key, Tensor(c!) tail_value, Tensor key, Tensor value, "
      "int coded) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) { m.impl("write_tail", TORCH_BOX(&ao::write_tail_op)); }
