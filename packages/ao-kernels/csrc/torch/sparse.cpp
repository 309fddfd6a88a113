// Matmuls with weights in the layouts bsr_cpu and two_four, and the dense weight of the latter.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "formats.h"
#include "sparse/sparse.h"

namespace ao {
namespace {

using Optional = std::optional<Tensor>;

ValueType value_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return ValueType::f32;
    case ScalarType::BFloat16: return ValueType::bf16;
    case ScalarType::Half: return ValueType::f16;
    case ScalarType::Byte: return ValueType::i8;
    default: break;
  }
  fail("qdata: has dtype ", dtype_name(dtype), "; must be Float, BFloat16, Half or Byte");
}

// Columns whose products of bytes can be summed up in 32 bits.
constexpr int64_t kGreatestInt8 = 65536;

// Activations (..., k), of which type and columns are told.
template <class Call>
void read_x(const Tensor& x, Call& t) {
  t.type = element_of("x", x);
  AO_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) >= 1, "x: has shape ", shape_text(x),
           ", no columns to multiply along");
  t.k = x.size(x.dim() - 1);
}

// Their rows, with the bias; the tensor for the output.
template <class Call>
Tensor read_rows(const Tensor& x, const Optional& bias, Call& t, std::vector<Tensor>& kept) {
  if (bias) {
    check_dtype("bias", *bias, {x.scalar_type()});
    check_numel("bias", *bias, t.n, "one per row of the weight");
    kept.push_back(readable("bias", *bias));
    t.bias = kept.back().const_data_ptr();
  }
  const bool rows = x.dim() == 2 && x.stride(1) == 1 && x.stride(0) >= t.k;
  if (rows) check_aligned("x", x);
  kept.push_back(rows ? x : readable("x", x));
  t.x = kept.back().const_data_ptr();
  t.x_stride = rows ? x.stride(0) : t.k;
  t.m = x.numel() / t.k;
  Tensor y = make_like(x, 1, {t.n}, x.scalar_type());
  t.y = y.mutable_data_ptr();
  return y;
}

// The places of blocks, which are where memory is read: all of them are looked at.
void check_places(const BlockSparse& t, int64_t stored) {
  AO_CHECK(t.starts[0] == 0 && t.starts[t.row_blocks] == stored, "crow_indices: runs from ", t.starts[0], " to ",
           t.starts[t.row_blocks], "; must run from 0 to the number of blocks, ", stored);
  for (int64_t r = 0; r < t.row_blocks; ++r) {
    AO_CHECK(t.starts[r] <= t.starts[r + 1], "crow_indices: entry ", r + 1, " is ", t.starts[r + 1],
             ", less than the one before");
  }
  for (int64_t i = 0; i < stored; ++i) {
    AO_CHECK(t.columns[i] >= 0 && t.columns[i] < t.column_blocks, "col_indices: entry ", i, " is ", t.columns[i],
             "; must be in 0..", t.column_blocks - 1);
  }
}

Tensor block_sparse_linear_op(const Tensor& x, const Tensor& qdata, const Tensor& col_indices,
                              const Tensor& crow_indices, const Optional& scale, const Optional& bias, int64_t n,
                              int64_t act) {
  BlockSparse t{};
  read_x(x, t);
  const int64_t k = t.k;
  check_sizes(n, k);
  AO_CHECK(act == 0 || (act == 1 && k <= kGreatestInt8), "act=", act, ": must be 0, or 1 with at most ", kGreatestInt8,
           " columns, found ", k);
  check_cpu("qdata", qdata);
  check_dim("qdata", qdata, 4);
  t.value = value_of(qdata.scalar_type());
  t.side = qdata.size(2);
  AO_CHECK(t.side >= 16 && t.side <= 256 && t.side % 16 == 0, "qdata: has shape ", shape_text(qdata),
           ", blocks of a side of ", t.side, "; must be 16, 32, ... or 256");
  const int64_t stored = qdata.size(0), together = together_of(t.value);
  check_shape("qdata", qdata, {stored, t.side / together, t.side, together});
  t.n = n, t.act = static_cast<Act>(act);
  t.row_blocks = (n + t.side - 1) / t.side, t.column_blocks = (k + t.side - 1) / t.side;
  check_dtype("col_indices", col_indices, {ScalarType::Int});
  check_cpu("col_indices", col_indices);
  check_numel("col_indices", col_indices, stored, "one per block");
  check_dtype("crow_indices", crow_indices, {ScalarType::Int});
  check_cpu("crow_indices", crow_indices);
  check_numel("crow_indices", crow_indices, t.row_blocks + 1, "one per row of blocks, and the end");
  const Tensor blocks = readable("qdata", qdata), columns = readable("col_indices", col_indices),
               starts = readable("crow_indices", crow_indices);
  t.blocks = static_cast<const uint8_t*>(blocks.const_data_ptr());
  t.columns = static_cast<const int32_t*>(columns.const_data_ptr());
  t.starts = static_cast<const int32_t*>(starts.const_data_ptr());
  check_places(t, stored);
  AO_CHECK(scale.has_value() == (t.value == ValueType::i8), "scale: is needed with Byte, and only then");
  AO_CHECK(t.act == Act::none || t.value == ValueType::i8, "act=", act, ": needs qdata of Byte");
  std::vector<Tensor> kept;
  if (scale) {
    t.scale_type = element_of("scale", *scale);
    t.scale_of_rows = scale->numel() != 1;
    check_numel("scale", *scale, t.scale_of_rows ? n : 1, "one per row of the weight, or one");
    kept.push_back(readable("scale", *scale));
    t.scale = kept.back().const_data_ptr();
  }
  Tensor y = read_rows(x, bias, t, kept);
  run_block_sparse(t);
  return y;
}

// Rows of two kept codes of every four: what both ops are told of a weight.
void read_two_four(const Tensor& qdata, const Tensor& index, const Optional& scale, const Optional& table, int64_t k,
                   int64_t group, TwoFour& t, std::vector<Tensor>& kept) {
  check_sizes(1, k);
  check_cpu("qdata", qdata);
  check_cpu("index", index);
  AO_CHECK(qdata.dim() >= 2, "qdata: has shape ", shape_text(qdata), "; must have 2 dimensions or more");
  const int64_t fours = (k + 3) / 4;
  t.k = k, t.row_bytes = qdata.size(qdata.dim() - 1) * static_cast<int64_t>(qdata.element_size());
  const bool coded = qdata.scalar_type() == ScalarType::Byte;
  if (coded) {
    t.value = ValueType::i8, t.bits = 4;
    if (table) {
      check_dtype("table", *table, {ScalarType::Float});
      AO_CHECK(table->numel() == 16 || table->numel() == 256, "table: has ", table->numel(),
               " values; must have 16 or 256");
      t.bits = table->numel() == 16 ? 4 : 8;
      kept.push_back(readable("table", *table));
      t.table = static_cast<const float*>(kept.back().const_data_ptr());
    }
  } else {
    AO_CHECK(!table, "table: is of codes, which need qdata of Byte");
    t.value = qdata.scalar_type() == ScalarType::Char ? ValueType::i8 : value_of(qdata.scalar_type());
    t.bits = 8 * bytes_of(t.value);
  }
  const int64_t row_bytes = 2 * fours * t.bits / 8;
  AO_CHECK(t.row_bytes == row_bytes, "qdata: has shape ", shape_text(qdata), ", rows of ", t.row_bytes,
           " bytes; must be ", row_bytes, " for k=", k);
  t.n = qdata.numel() * static_cast<int64_t>(qdata.element_size()) / row_bytes;
  t.place_bytes = (fours + 1) / 2;
  check_dtype("index", index, {ScalarType::Byte});
  check_numel("index", index, t.n * t.place_bytes, "a byte for every 8 columns of a row");
  kept.push_back(readable("qdata", qdata));
  t.codes = static_cast<const uint8_t*>(kept.back().const_data_ptr());
  kept.push_back(readable("index", index));
  t.places = static_cast<const uint8_t*>(kept.back().const_data_ptr());
  AO_CHECK(group >= 1 && (group >= k || group % 32 == 0), "group=", group, ": must be a multiple of 32, or k=", k);
  t.group = group, t.scale_groups = (k - 1) / group + 1;
  if (scale) {
    t.scale_type = element_of("scale", *scale);
    t.scale_of_rows = scale->numel() != 1;
    check_numel("scale", *scale, t.scale_of_rows ? t.n * t.scale_groups : 1, "one per group of every row, or one");
    AO_CHECK(t.scale_of_rows || t.scale_groups == 1, "scale: has one element; must have one per group");
    kept.push_back(readable("scale", *scale));
    t.scale = kept.back().const_data_ptr();
  }
}

Tensor two_four_linear_op(const Tensor& x, const Tensor& qdata, const Tensor& index, const Optional& scale,
                          const Optional& bias, int64_t group) {
  TwoFour t{};
  std::vector<Tensor> kept;
  read_x(x, t);
  check_dim("qdata", qdata, 2);
  read_two_four(qdata, index, scale, std::nullopt, t.k, group, t, kept);
  Tensor y = read_rows(x, bias, t, kept);
  run_two_four(t);
  return y;
}

Tensor two_four_dequantize_op(const Tensor& qdata, const Tensor& index, const Optional& scale, const Optional& table,
                              int64_t k, int64_t group, ScalarType dtype) {
  TwoFour t{};
  std::vector<Tensor> kept;
  t.type = element_of("dtype", dtype);
  read_two_four(qdata, index, scale, table, k, group, t, kept);
  Tensor y = make_like(qdata, 1, {k}, dtype);
  t.y = y.mutable_data_ptr();
  expand_two_four(t);
  return y;
}

Tensor two_four_mask_op(const Tensor& x) {
  TileMask t{};
  t.type = element_of("x", x);
  check_dim("x", x, 2);
  const Tensor dense = readable("x", x);
  t.n = x.size(0), t.k = x.size(1);
  Tensor mask = make({t.n, t.k}, ScalarType::Bool);
  if (mask.numel() == 0) return mask;
  t.x = dense.const_data_ptr();
  t.mask = static_cast<uint8_t*>(mask.mutable_data_ptr());
  mask_tiles(t);
  return mask;
}

}  // namespace
}  // namespace ao

// See the layouts bsr_cpu and two_four. scale: of codes; act=1: activations are quantized per token to int8; group:
// columns that share a scale; qdata of Byte: signed integers of 4 bits, or codes of the table. two_four_mask: see
// `TileMask`.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "block_sparse_linear(Tensor x, Tensor qdata, Tensor col_indices, Tensor crow_indices, Tensor? scale, "
      "Tensor? bias, int n, int act) -> Tensor");
  m.def("two_four_linear(Tensor x, Tensor qdata, Tensor index, Tensor? scale, Tensor? bias, int group) -> Tensor");
  m.def(
      "two_four_dequantize(Tensor qdata, Tensor index, Tensor? scale, Tensor? table, int k, int group, "
      "ScalarType dtype) -> Tensor");
  m.def("two_four_mask(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) {
  m.impl("block_sparse_linear", TORCH_BOX(&ao::block_sparse_linear_op));
  m.impl("two_four_linear", TORCH_BOX(&ao::two_four_linear_op));
  m.impl("two_four_dequantize", TORCH_BOX(&ao::two_four_dequantize_op));
  m.impl("two_four_mask", TORCH_BOX(&ao::two_four_mask_op));
}
