// Weights on a trellis: the search for codes, matmuls, and dense values.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "formats.h"
#include "trellis/trellis.h"

namespace ao {
namespace {

using Optional = std::optional<Tensor>;

// The format, and the tensor that keeps its table.
Tensor read_trellis(const Tensor& table, int64_t multiplier, int64_t bits, TrellisFormat& f) {
  check_dtype("table", table, {ScalarType::Char});
  check_numel("table", table, 256, "one per index of 8 bits");
  check_range("multiplier", multiplier, 1, kStates - 1);
  check_range("bits", bits, 2, 4);
  Tensor kept = readable("table", table);
  f.table = static_cast<const int8_t*>(kept.const_data_ptr());
  f.multiplier = static_cast<int32_t>(multiplier), f.bits = static_cast<int32_t>(bits);
  return kept;
}

Tensor encode_op(const Tensor& x, const Tensor& table, int64_t multiplier, int64_t bits, int64_t count) {
  TrellisFormat format{};
  const Tensor kept = read_trellis(table, multiplier, bits, format);
  check_dim("x", x, 2);
  check_dtype("x", x, {ScalarType::Float});
  TrellisSearch t{};
  t.rings = x.size(0), t.places = x.size(1), t.count = count, t.bits = format.bits;
  AO_CHECK(t.places >= kStateBits && t.places % 2 == 0 && t.places <= 4096, "x: has shape ", shape_text(x),
           "; a ring has an even number of places from ", kStateBits, " to 4096");
  check_range("count", count, 0, t.places);
  const Tensor from = readable("x", x);
  Tensor codes = make({t.rings, t.places}, ScalarType::Byte);
  t.x = static_cast<const float*>(from.const_data_ptr());
  t.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  search_trellis(format, t);
  return codes;
}

// The parts of a matrix (n, k).
void read_parts(const Tensor& qdata, const Tensor& scale, Trellis& t, std::vector<Tensor>& kept) {
  check_sizes(t.n, t.k);
  check_dtype("qdata", qdata, {ScalarType::Byte});
  check_shape("qdata", qdata, {(t.n + kRing - 1) / kRing, t.k * kRing * t.bits / 8});
  t.scale_type = element_of("scale", scale);
  check_numel("scale", scale, t.n, "one per row");
  kept.push_back(readable("qdata", qdata));
  t.qdata = static_cast<const uint8_t*>(kept.back().const_data_ptr());
  kept.push_back(readable("scale", scale));
  t.scale = kept.back().const_data_ptr();
}

Tensor linear_op(const Tensor& x, const Tensor& qdata, const Tensor& scale, const Optional& bias, const Tensor& table,
                 int64_t multiplier, int64_t bits, int64_t n) {
  std::vector<Tensor> kept;
  Trellis t{};
  kept.push_back(read_trellis(table, multiplier, bits, t));
  t.type = element_of("x", x);
  AO_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) >= 1, "x: has shape ", shape_text(x), ", no columns to multiply along");
  t.n = n, t.k = x.size(x.dim() - 1);
  read_parts(qdata, scale, t, kept);
  if (bias) {
    check_dtype("bias", *bias, {x.scalar_type()});
    check_numel("bias", *bias, n, "one per row of the weight");
    kept.push_back(readable("bias", *bias));
    t.bias = kept.back().const_data_ptr();
  }
  kept.push_back(readable("x", x));
  t.x = kept.back().const_data_ptr();
  t.x_stride = t.k, t.m = x.numel() / t.k;
  Tensor y = make_like(x, 1, {n}, x.scalar_type());
  t.y = y.mutable_data_ptr();
  if (t.m > 0) multiply_trellis(t);
  return y;
}

Tensor dequantize_op(const Tensor& qdata, const Tensor& scale, const Tensor& table, int64_t multiplier, int64_t bits,
                     int64_t n, int64_t k, ScalarType dtype) {
  std::vector<Tensor> kept;
  Trellis t{};
  kept.push_back(read_trellis(table, multiplier, bits, t));
  t.type = element_of("dtype", dtype);
  t.n = n, t.k = k;
  read_parts(qdata, scale, t, kept);
  Tensor y = make({n, k}, dtype);
  t.y = y.mutable_data_ptr();
  decode_trellis(t);
  return y;
}

}  // namespace
}  // namespace ao

STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  // Codes of rings (S, T) for x (S, T); places from `count` on have any value. `table`: int8 (256,).
  m.def("trellis_encode(Tensor x, Tensor table, int multiplier, int bits, int count) -> Tensor");
  // x @ w.T + bias, of a weight (n, K) in the layout "trellis".
  m.def(
      "trellis_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias, Tensor table, int multiplier, int bits, "
      "int n) -> Tensor");
  // The dense weight (n, k).
  m.def(
      "trellis_dequantize(Tensor qdata, Tensor scale, Tensor table, int multiplier, int bits, int n, int k, "
      "ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) {
  m.impl("trellis_encode", TORCH_BOX(&ao::encode_op));
  m.impl("trellis_linear", TORCH_BOX(&ao::linear_op));
  m.impl("trellis_dequantize", TORCH_BOX(&ao::dequantize_op));
}
