// Matmuls with weights in the layout cpu_tiles.
#include <torch/csrc/stable/library.h>

#include "product.h"

namespace ao {
namespace {

Tensor stored_linear_op(const Tensor& x, const Tensor& qdata, const Tensor& scale, const Optional& scale_outer,
                        const Optional& zero, const Optional& offset, const Optional& offset_outer,
                        const Optional& rowsum, const Tensor& table, const Optional& bias, int64_t n, int64_t bits,
                        int64_t group, int64_t span, int64_t kind, int64_t act, int64_t stored, int64_t fill,
                        const Optional& act_scale, const Optional& act_zero) {
  check_x(x);
  check_range("stored", stored, 0, 2);
  check_range("fill", fill, 0, 255);
  const auto how = static_cast<StoredAs>(stored);
  AO_CHECK(how != StoredAs::digits || bits == 2, "bits=", bits, ": digits are of 2 bits");
  AO_CHECK(how != StoredAs::two_four || bits == 4 || bits == 8, "bits=", bits, ": two of four have 4 or 8 bits");
  Product p;
  const QuantParamTensors affine{scale, scale_outer, zero, offset, offset_outer, span};
  p.read_weight(qdata, affine, rowsum, table, n, x.size(x.dim() - 1), bits, group, kind, act, how, fill);
  if (act_scale) p.take_static(*act_scale, act_zero);
  if (bias) {
    check_dtype("bias", *bias, {x.scalar_type()});
    check_numel("bias", *bias, n, "one per row of the weight");
    p.call.bias = p.keep(readable("bias", *bias));
  }
  Tensor y = make_like(x, 1, {n}, x.scalar_type());
  p.read_activations(x, y);
  run_linear(p.call);
  return y;
}

Tensor linear_op(const Tensor& x, const Tensor& qdata, const Tensor& scale, const Optional& scale_outer,
                 const Optional& zero, const Optional& offset, const Optional& offset_outer, const Optional& rowsum,
                 const Tensor& table, const Optional& bias, int64_t n, int64_t bits, int64_t group, int64_t span,
                 int64_t kind, int64_t act) {
  return stored_linear_op(x, qdata, scale, scale_outer, zero, offset, offset_outer, rowsum, table, bias, n, bits,
                          group, span, kind, act, 0, 0, std::nullopt, std::nullopt);
}

Tensor grouped_linear_op(const Tensor& x, const Tensor& qdata, const Tensor& scale, const Optional& scale_outer,
                         const Optional& zero, const Optional& offset, const Optional& offset_outer,
                         const Optional& rowsum, const Tensor& table, const Optional& offs, int64_t n,
                         int64_t bits, int64_t group, int64_t span, int64_t kind, int64_t act) {
  check_x(x);
  check_dim("qdata", qdata, 4);
  const int64_t experts = qdata.size(0);
  check_range("qdata: experts", experts, 1, 1 << 20);
  check_dim("x", x, offs ? 2 : 3);
  Product p;
  p.experts = experts;
  const QuantParamTensors affine{scale, scale_outer, zero, offset, offset_outer, span};
  p.read_weight(qdata, affine, rowsum, table, n, x.size(x.dim() - 1), bits, group, kind, act);
  std::vector<int64_t> ends(static_cast<size_t>(experts));
  const int64_t rows = offs ? x.size(0) : x.size(0) * x.size(1);
  if (offs) {
    check_dtype("offs", *offs, {ScalarType::Int});
    check_numel("offs", *offs, experts, "one per expert");
    const Tensor given = readable("offs", *offs);
    const auto* values = static_cast<const int32_t*>(given.const_data_ptr());
    for (int64_t e = 0, last = 0; e < experts; ++e) {
      AO_CHECK(values[e] >= last && values[e] <= rows, "offs: entry ", e, " is ", values[e],
               "; must be from ", last, " (no less than the one before) to the number of rows, ", rows);
      ends[static_cast<size_t>(e)] = last = values[e];
    }
  } else {
    AO_CHECK(x.size(0) == experts, "x: has shape ", shape_text(x), "; must start with the ", experts,
             " experts of qdata");
    for (int64_t e = 0; e < experts; ++e) ends[static_cast<size_t>(e)] = (e + 1) * x.size(1);
  }
  Tensor y = make_like(x, 1, {n}, x.scalar_type());
  p.read_activations(x, y);
  int64_t begin = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t end = ends[static_cast<size_t>(e)];
    p.run_expert(e, begin, end);
    begin = end;
  }
  const int64_t size = bytes_of(p.call.type);
  if (begin < rows) std::memset(static_cast<uint8_t*>(p.call.y) + begin * n * size, 0, (rows - begin) * n * size);
  return y;
}

// What `explain` tells of a matmul before there is one.
bool in_tile_registers_op(const Tensor& table, int64_t m, int64_t k, int64_t group, int64_t kind, int64_t act,
                          bool zero, ScalarType dtype) {
  check_range("k", k, 1, kGreatestSize);
  check_range("group", group, 1, k);
  check_range("act", act, 0, 4);
  Format format;
  read_table(table, format);
  Linear call{};
  call.table = format.table, call.bits = format.bits, call.kind = kind_of(kind, format.table, format.bits);
  call.m = m, call.k = k, call.group = group, call.groups = (k + group - 1) / group;
  call.type = element_of("dtype", dtype), call.act = static_cast<Act>(act);
  call.zero_type = zero ? Zero::f32 : Zero::none;
  return in_tile_registers(call);
}

}  // namespace
}  // namespace ao

STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "linear(Tensor x, Tensor qdata, Tensor scale, Tensor? scale_outer, Tensor? zero_point, Tensor? offset, "
      "Tensor? offset_outer, Tensor? rowsum, Tensor table, Tensor? bias, int n, int bits, int group, int span, "
      "int kind, int act) -> Tensor");
  m.def(
      "stored_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? scale_outer, Tensor? zero_point, Tensor? offset, "
      "Tensor? offset_outer, Tensor? rowsum, Tensor table, Tensor? bias, int n, int bits, int group, int span, "
      "int kind, int act, int stored, int fill, Tensor? act_scale, Tensor? act_zero_point) -> Tensor");
  m.def(
      "grouped_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? scale_outer, Tensor? zero_point, Tensor? offset, "
      "Tensor? offset_outer, Tensor? rowsum, Tensor table, Tensor? offs, int n, int bits, int group, int span, "
      "int kind, int act) -> Tensor");
  m.def(
      "in_tile_registers(Tensor table, int m, int k, int group, int kind, int act, bool zero_point, "
      "ScalarType dtype) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) {
  m.impl("linear", TORCH_BOX(&ao::linear_op));
  m.impl("stored_linear", TORCH_BOX(&ao::stored_linear_op));
  m.impl("grouped_linear", TORCH_BOX(&ao::grouped_linear_op));
  m.impl("in_tile_registers", TORCH_BOX(&ao::in_tile_registers_op));
}
