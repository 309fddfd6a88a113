// What comes before and after attention in a decoder block.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "block_call.h"

namespace ao {
namespace {

std::tuple<Tensor, Tensor, Tensor> qkv_op(const Tensor& x, const Optional& norm, double eps, int64_t gain,
                                          const Optional& qdata, const Optional& scale, const Optional& scale_outer,
                                          const Optional& zero, const Optional& offset, const Optional& offset_outer,
                                          const Optional& rowsum, const Optional& table, const Optional& bias,
                                          Numbers numbers, const Tensor& cosine, const Tensor& sine, Numbers heads) {
  check_x(x);
  check_dim("x", x, 3);
  AO_CHECK(heads.size() == 3, "heads: has ", heads.size(), " numbers; must have 3: of queries, of keys, elements");
  Qkv call{};
  Heads& h = call.heads;
  h.q = heads[0], h.kv = heads[1], h.dim = heads[2];
  for (const int64_t number : heads) check_range("heads", number, 1, 1 << 20);
  const ScalarType dtype = x.scalar_type();
  const int64_t batch = x.size(0), tokens = x.size(1), k = x.size(2);
  Product p;
  const WeightTensors weight{"", qdata, scale, scale_outer, zero, offset, offset_outer, rowsum, table, bias, numbers};
  weight.read(p, k, dtype);
  AO_CHECK(p.call.n == (h.q + 2 * h.kv) * h.dim, "heads: are ", h.q, " + 2 * ", h.kv, " of ", h.dim,
           " elements; the weight has ", p.call.n, " rows");
  check_dtype("cosine", cosine, {dtype});
  check_dim("cosine", cosine, 3);
  const int64_t tables = cosine.size(0);
  h.rotary = cosine.size(2);
  AO_CHECK(tables == 1 || tables == batch, "cosine: has shape ", shape_text(cosine), "; must start with 1 or ", batch);
  AO_CHECK(h.rotary % 2 == 0 && h.rotary <= h.dim, "cosine: has ", h.rotary,
           " elements for a token; must be an even number up to ", h.dim);
  check_shape("cosine", cosine, {tables, tokens, h.rotary});
  check_dtype("sine", sine, {dtype});
  check_shape("sine", sine, {tables, tokens, h.rotary});
  const Tensor rows = readable("x", x), cosines = readable("cosine", cosine), sines = readable("sine", sine);
  Tensor kept;
  call.norm = read_norm(norm, eps, gain, k, dtype, kept);
  call.x = rows.const_data_ptr(), call.m = batch * tokens, call.linear = p.call;
  h.cosine = cosines.const_data_ptr(), h.sine = sines.const_data_ptr();
  h.tokens = tokens, h.table_batch = tables == 1 ? 0 : tokens * h.rotary, h.type = *element_of(dtype);
  Tensor query = make({batch, h.q, tokens, h.dim}, dtype), key = make({batch, h.kv, tokens, h.dim}, dtype);
  Tensor value = make({batch, h.kv, tokens, h.dim}, dtype);
  h.query = query.mutable_data_ptr(), h.key = key.mutable_data_ptr(), h.value = value.mutable_data_ptr();
  run_qkv(call);
  return {query, key, value};
}

#define AO_WEIGHT(w)                                                                                                \
  const Optional &w##_qdata, const Optional &w##_scale, const Optional &w##_scale_outer, const Optional &w##_zero,  \
      const Optional &w##_offset, const Optional &w##_offset_outer, const Optional &w##_rowsum,                     \
      const Optional &w##_table, const Optional &w##_bias, Numbers w##_numbers
#define AO_WEIGHT_TENSORS(w)                                                                                        \
  WeightTensors {                                                                                                   \
    #w "_", w##_qdata, w##_scale, w##_scale_outer, w##_zero, w##_offset, w##_offset_outer, w##_rowsum, w##_table,       \
        w##_bias, w##_numbers                                                                                       \
  }

Tensor mlp_op(const Tensor& x, const Optional& residual, const Optional& norm, double eps, int64_t gain,
              AO_WEIGHT(output), AO_WEIGHT(gate_up), AO_WEIGHT(down), int64_t gate) {
  check_x(x);
  check_range("gate", gate, 0, 1);
  const ScalarType dtype = x.scalar_type();
  const int64_t columns = x.size(x.dim() - 1);
  Mlp call{};
  call.gate = static_cast<Gate>(gate), call.type = *element_of(dtype), call.m = x.numel() / columns;
  call.has_output = output_qdata.has_value();
  Product output, gate_up, down;
  int64_t k = columns;
  if (call.has_output) {
    AO_WEIGHT_TENSORS(output).read(output, columns, dtype);
    k = output.call.n;
  }
  AO_WEIGHT_TENSORS(gate_up).read(gate_up, k, dtype);
  AO_CHECK(gate_up.call.n % 2 == 0, "gate_up_numbers: are of ", gate_up.call.n, " rows; must have as many for gate as for up");
  AO_WEIGHT_TENSORS(down).read(down, gate_up.call.n / 2, dtype);
  const Tensor rows = readable("x", x);
  Tensor added, kept;
  if (residual) {
    check_dtype("residual", *residual, {dtype});
    check_numel("residual", *residual, call.m * k, "those of x, projected");
    AO_CHECK(down.call.n == k, "down_numbers: are of ", down.call.n, " rows; must have ", k, ", to be added to `residual`");
    added = readable("residual", *residual);
    call.residual = added.const_data_ptr();
  }
  call.norm = read_norm(norm, eps, gain, k, dtype, kept);
  Tensor y = make_like(x, 1, {down.call.n}, dtype);
  call.x = rows.const_data_ptr(), call.y = y.mutable_data_ptr();
  call.output = output.call, call.gate_up = gate_up.call, call.down = down.call;
  run_mlp(call);
  return y;
}

}  // namespace
}  // namespace ao

#define AO_WEIGHT_SCHEMA(w)                                                                              \
  "Tensor? " w "qdata, Tensor? " w "scale, Tensor? " w "scale_outer, Tensor? " w "zero_point, "          \
  "Tensor? " w "offset, Tensor? " w "offset_outer, Tensor? " w "rowsum, Tensor? " w "table, Tensor? " w "bias, " \
  "int[] " w "numbers, "

STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def("qkv(Tensor x, Tensor? norm, float eps, int gain, " AO_WEIGHT_SCHEMA("") 
        "Tensor cosine, Tensor sine, int[] heads) -> (Tensor, Tensor, Tensor)");
  m.def("mlp(Tensor x, Tensor? residual, Tensor? norm, float eps, int gain, " AO_WEIGHT_SCHEMA("output_")
        AO_WEIGHT_SCHEMA("gate_up_") AO_WEIGHT_SCHEMA("down_") "int gate) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) {
  m.impl("qkv", TORCH_BOX(&ao::qkv_op));
  m.impl("mlp", TORCH_BOX(&ao::mlp_op));
}
