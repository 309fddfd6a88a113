// Checks of the arguments of ops. What fails becomes a Python RuntimeError that names the argument.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>

namespace ao {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws with a message put together from the parts.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// AO_CHECK(n > 0, "n=", n, ": must be positive"): the message is only made where it is needed.
#define AO_CHECK(condition, ...)                     \
  do {                                               \
    if (!(condition)) [[unlikely]] ao::fail(__VA_ARGS__); \
  } while (false)

// A dtype as torch writes it, without "torch.": "bfloat16".
inline const char* dtype_name(ScalarType dtype) { return torch::headeronly::toString(dtype); }

// The shape as text: "(3, 4)".
inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << '(';
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ')';
  return text.str();
}

// torch lets None pass as a tensor.
inline void check_defined(const char* name, const Tensor& tensor) {
  AO_CHECK(tensor.defined(), name, ": must be a tensor, found None");
}

inline void check_cpu(const char* name, const Tensor& tensor) {
  check_defined(name, tensor);
  AO_CHECK(tensor.is_cpu(), name, ": must be a tensor on the CPU");
}

inline void check_dtype(const char* name, const Tensor& tensor,
                        std::initializer_list<ScalarType> allowed) {
  check_defined(name, tensor);
  const ScalarType dtype = tensor.scalar_type();
  for (ScalarType one : allowed) {
    if (dtype == one) return;
  }
  std::ostringstream text;
  for (ScalarType one : allowed) text << (one == *allowed.begin() ? "" : ", ") << dtype_name(one);
  fail(name, ": has dtype ", dtype_name(dtype), "; must be one of ", text.str());
}

inline void check_dim(const char* name, const Tensor& tensor, int64_t dim) {
  check_defined(name, tensor);
  AO_CHECK(tensor.dim() == dim, name, ": has shape ", shape_text(tensor), "; must have ", dim,
           " dimensions");
}

inline void check_shape(const char* name, const Tensor& tensor,
                        std::initializer_list<int64_t> shape) {
  check_defined(name, tensor);
  bool same = tensor.dim() == static_cast<int64_t>(shape.size());
  for (int64_t i = 0; same && i < tensor.dim(); ++i) same = tensor.size(i) == shape.begin()[i];
  if (same) return;
  std::ostringstream text;
  for (const int64_t& size : shape) text << (&size == shape.begin() ? "" : ", ") << size;
  fail(name, ": has shape ", shape_text(tensor), "; must be (", text.str(), ")");
}

inline void check_contiguous(const char* name, const Tensor& tensor) {
  AO_CHECK(tensor.is_contiguous(), name, ": must be contiguous");
}

inline void check_range(const char* name, int64_t value, int64_t least, int64_t greatest) {
  AO_CHECK(value >= least && value <= greatest, name, "=", value, ": must be in ", least, "..",
           greatest);
}

// Kernels read elements at their own alignment.
inline void check_aligned(const char* name, const Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  AO_CHECK(address % tensor.element_size() == 0, name, ": its memory is not aligned to ",
           tensor.element_size(), " bytes");
}

}  // namespace ao
