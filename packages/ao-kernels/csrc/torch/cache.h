// Tensors of a cache of keys and values, checked.
#pragma once

#include "cache/append.h"
#include "formats.h"

namespace ao {

inline void check_tail(const char* name, const Tensor& tail, const char* of, const Tensor& from) {
  check_cpu(of, from);
  check_dim(of, from, 4);
  check_cpu(name, tail);
  check_dtype(name, tail, {from.scalar_type()});
  check_dim(name, tail, 4);
  check_shape(name, tail, {from.size(0), from.size(1), tail.size(2), from.size(3)});
  check_contiguous(name, tail);
}

// How many tokens there are, and how many of them are in blocks.
inline int64_t* writable_counts(const Tensor& counts) {
  check_cpu("counts", counts);
  check_dtype("counts", counts, {ScalarType::Long});
  check_shape("counts", counts, {2});
  check_contiguous("counts", counts);
  return static_cast<int64_t*>(counts.mutable_data_ptr());
}

// Tokens (B, H, T, size), as they are or as a copy with contiguous elements; `kept` holds the memory.
inline NewRows rows_of_tokens(const Tensor& x, Tensor& kept) {
  kept = x.size(3) <= 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
  return {kept.const_data_ptr(), kept.stride(0), kept.stride(1), kept.stride(2)};
}

}  // namespace ao
