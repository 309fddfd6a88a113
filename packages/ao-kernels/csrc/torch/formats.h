// Arguments that describe number formats, scales and blocks, checked.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <bit>
#include <cstring>
#include <optional>
#include <vector>

#include "checks.h"
#include "quantize/quantize.h"

namespace ao {

using torch::headeronly::IntHeaderOnlyArrayRef;

constexpr int64_t kGreatestSize = int64_t{1} << 40;

inline std::optional<Element> element_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return Element::f32;
    case ScalarType::BFloat16: return Element::bf16;
    case ScalarType::Half: return Element::f16;
    default: return std::nullopt;
  }
}

inline Element element_of(const char* name, ScalarType dtype) {
  const std::optional<Element> found = element_of(dtype);
  AO_CHECK(found, name, ": is ", dtype_name(dtype), "; must be Float, BFloat16 or Half");
  return *found;
}

inline Element element_of(const char* name, const Tensor& tensor) {
  check_cpu(name, tensor);
  return element_of(name, tensor.scalar_type());
}

inline Scale scale_of(const char* name, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return Scale::f32;
    case ScalarType::BFloat16: return Scale::bf16;
    case ScalarType::Half: return Scale::f16;
    case ScalarType::Float8_e8m0fnu: return Scale::e8m0;
    case ScalarType::Float8_e4m3fn: return Scale::e4m3;
    default: break;
  }
  fail(name, ": has dtype ", dtype_name(dtype),
       "; must be Float, BFloat16, Half, Float8_e8m0fnu or Float8_e4m3fn");
}

inline Scale scale_of(const char* name, const Tensor& tensor) {
  check_cpu(name, tensor);
  return scale_of(name, tensor.scalar_type());
}

inline Zero zero_of(const char* name, const Tensor& tensor) {
  check_cpu(name, tensor);
  const ScalarType dtype = tensor.scalar_type();
  switch (dtype) {
    case ScalarType::Byte: return Zero::u8;
    case ScalarType::Float: return Zero::f32;
    case ScalarType::BFloat16: return Zero::bf16;
    case ScalarType::Half: return Zero::f16;
    default: break;
  }
  fail(name, ": has dtype ", dtype_name(dtype), "; must be Byte, Float, BFloat16 or Half");
}

// Scales of tiles may be whole numbers, too.
inline Scale tile_scale_of(const char* name, const Tensor& tensor) {
  check_cpu(name, tensor);
  if (tensor.scalar_type() == ScalarType::Byte) return Scale::u8;
  if (tensor.scalar_type() == ScalarType::Char) return Scale::i8;
  return scale_of(name, tensor);
}

inline ScalarType dtype_of(Scale type) {
  switch (type) {
    case Scale::f32: return ScalarType::Float;
    case Scale::bf16: return ScalarType::BFloat16;
    case Scale::f16: return ScalarType::Half;
    case Scale::e8m0: return ScalarType::Float8_e8m0fnu;
    default: return ScalarType::Float8_e4m3fn;
  }
}

inline ScalarType dtype_of(Zero type) {
  switch (type) {
    case Zero::u8: return ScalarType::Byte;
    case Zero::bf16: return ScalarType::BFloat16;
    case Zero::f16: return ScalarType::Half;
    default: return ScalarType::Float;
  }
}

// A tensor on the CPU, as it is or as a contiguous copy, aligned to its elements.
inline Tensor readable(const char* name, const Tensor& tensor) {
  check_cpu(name, tensor);
  check_aligned(name, tensor);
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline void check_numel(const char* name, const Tensor& tensor, int64_t count, const char* of) {
  AO_CHECK(tensor.numel() == count, name, ": has shape ", shape_text(tensor), ", so ",
           tensor.numel(), " elements; must have ", count, ", ", of);
}

// An empty tensor. Not `torch::stable::empty`, which finds its op by name each time: for a single row of
// activations that is a tenth of what a call takes besides the matmul.
inline Tensor make(IntHeaderOnlyArrayRef shape, ScalarType dtype) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i > 1; --i) strides[i - 2] = strides[i - 1] * (shape[i - 1] > 0 ? shape[i - 1] : 1);
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                         strides.data(), code, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}
inline Tensor make(std::initializer_list<int64_t> shape, ScalarType dtype) {
  return make(IntHeaderOnlyArrayRef(shape.begin(), shape.size()), dtype);
}

// The sizes of a tensor but its last `drop`, and then `tail`.
inline Tensor make_like(const Tensor& tensor, int64_t drop, std::initializer_list<int64_t> tail, ScalarType dtype) {
  std::vector<int64_t> shape(tensor.sizes().begin(), tensor.sizes().end() - drop);
  shape.insert(shape.end(), tail);
  return make(IntHeaderOnlyArrayRef(shape.data(), shape.size()), dtype);
}

// Values of codes are float32, or the bits of such numbers, as weights store them.
inline void check_values(const Tensor& table) { check_dtype("table", table, {ScalarType::Float, ScalarType::Int}); }

// `table`: the value of each code; the number of bits follows from it.
inline void read_table(const Tensor& table, Format& format) {
  check_values(table);
  const int64_t codes = table.numel();
  AO_CHECK(codes >= 2 && codes <= 256 && std::has_single_bit(static_cast<uint64_t>(codes)),
           "table: has ", codes, " values; must have 2, 4, 8, ... or 256");
  const Tensor values = readable("table", table);
  std::memcpy(format.table, values.const_data_ptr(), static_cast<size_t>(codes) * sizeof(float));
  format.bits = std::countr_zero(static_cast<uint64_t>(codes));
  format.rule = Rule::search;
  format.nan_code = 0;
}

inline void finish_format(Format& format) {
  const char* problem = complete(format);
  AO_CHECK(problem == nullptr, "table: ", problem, ", which rule=", static_cast<int>(format.rule),
           " needs; rule=0 takes any increasing order");
}

// What encoding needs besides.
inline void read_format(const Tensor& table, const Tensor& steps, const Tensor& order,
                        int64_t nan_code, int64_t rule, Format& format) {
  read_table(table, format);
  const int64_t codes = int64_t{1} << format.bits;
  check_range("rule", rule, 0, 2);
  check_range("nan_code", nan_code, 0, codes - 1);
  check_dtype("steps", steps, {ScalarType::Int});
  check_numel("steps", steps, codes - 1, "one less than `table`");
  check_dtype("order", order, {ScalarType::Byte});
  check_numel("order", order, codes, "as `table`");
  const Tensor keys = readable("steps", steps), intervals = readable("order", order);
  set_steps(format, static_cast<const int32_t*>(keys.const_data_ptr()));
  std::memcpy(format.order, intervals.const_data_ptr(), static_cast<size_t>(codes));
  for (int64_t i = 0; i < codes; ++i) {
    check_range("order: a code", format.order[i], 0, codes - 1);
  }
  format.nan_code = static_cast<uint8_t>(nan_code);
  format.rule = static_cast<Rule>(rule);
  finish_format(format);
}

// Blocks of `rows` rows.
inline Blocks read_blocks(int64_t rows, int64_t n, int64_t k, int64_t block_n, int64_t block_k) {
  check_range("block_n", block_n, 1, n);
  check_range("block_k", block_k, 1, k);
  AO_CHECK(rows > 0 && rows % n == 0, "n=", n, ": there are ", rows,
           " rows, no whole number of matrices of that many");
  return blocks_of(rows / n, n, k, block_n, block_k);
}

inline void check_sizes(int64_t n, int64_t k) {
  check_range("n", n, 1, kGreatestSize);
  check_range("k", k, 1, kGreatestSize);
}

// Rows of `size` elements that a tensor consists of.
inline int64_t rows_of(const char* name, const Tensor& tensor, int64_t size) {
  AO_CHECK(tensor.numel() > 0, name, ": is empty");
  AO_CHECK(tensor.numel() % size == 0, name, ": has shape ", shape_text(tensor),
           ", no whole number of rows of ", size);
  return tensor.numel() / size;
}

}  // namespace ao
