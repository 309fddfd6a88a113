// Ops between dense tensors and rows of codes.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "formats.h"

namespace ao {
namespace {

// Codes of x; as many rows, each of packed or of whole bytes.
Tensor set_codes(Quantize& q, bool pack) {
  const Blocks& b = q.blocks;
  q.code_bits = pack ? q.format.bits : 8;
  q.row_bytes = packed_size(b.k, q.code_bits);
  Tensor codes = make({b.matrices * b.n, q.row_bytes}, ScalarType::Byte);
  q.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  return codes;
}

Zero stored_zero(ZeroKind kind, Scale scale) {
  if (kind == ZeroKind::none) return Zero::none;
  if (kind == ZeroKind::code) return Zero::u8;
  return scale == Scale::bf16 ? Zero::bf16 : scale == Scale::f16 ? Zero::f16 : Zero::f32;
}

// What is to be quantized, in blocks; `dense` keeps it.
Quantize of_dense(const Tensor& x, int64_t n, int64_t k, int64_t block_n, int64_t block_k, Tensor& dense) {
  Quantize q{};
  q.type = element_of("x", x);
  dense = readable("x", x);
  check_sizes(n, k);
  q.blocks = read_blocks(rows_of("x", x, k), n, k, block_n, block_k);
  q.x = dense.const_data_ptr();
  return q;
}

// Where scales and zero points of a tensor go that are chosen.
struct ChosenTensors {
  Tensor scales, zeros;
};

// Fills in how scales are chosen, and their memory; of the op's arguments of these names.
ChosenTensors set_choice(Quantize& q, double reach, int64_t zero, ScalarType scale_dtype, int64_t mx_mode) {
  check_range("zero_point", zero, 0, 3);
  check_range("mx_mode", mx_mode, 0, 3);
  AO_CHECK(reach >= 0x1p-100 && reach <= 0x1p100, "quant_max=", reach,
           ": must be positive, from 2**-100 to 2**100");
  AO_CHECK(zero != 1 || q.format.rule == Rule::integer, "zero_point=1, rule=", static_cast<int>(q.format.rule),
           ": zero points that are codes need integers, rule=1");
  q.zero_kind = static_cast<ZeroKind>(zero);
  q.mx_mode = static_cast<MxMode>(mx_mode);
  q.scale_type = scale_of("scale_dtype", scale_dtype);
  q.zero_type = stored_zero(q.zero_kind, q.scale_type);
  if (q.zero_kind != ZeroKind::none) q.mx_mode = MxMode::rceil;
  set_reach(q, reach);
  const Blocks& b = q.blocks;
  ChosenTensors made{make({b.matrices, b.bands, b.groups}, scale_dtype),
                     q.zero_kind == ZeroKind::none ? make({0}, ScalarType::Float)
                                                   : make({b.matrices, b.bands, b.groups}, dtype_of(q.zero_type))};
  q.scale = made.scales.mutable_data_ptr();
  q.zero = made.zeros.mutable_data_ptr();
  return made;
}

std::tuple<Tensor, Tensor, Tensor> quantize_op(const Tensor& x, const Tensor& table,
                                               const Tensor& steps, const Tensor& order,
                                               int64_t nan_code, int64_t rule, int64_t n, int64_t k,
                                               int64_t block_n, int64_t block_k, double reach,
                                               int64_t zero, ScalarType scale_dtype,
                                               int64_t mx_mode, bool pack) {
  Tensor dense;
  Quantize q = of_dense(x, n, k, block_n, block_k, dense);
  read_format(table, steps, order, nan_code, rule, q.format);
  ChosenTensors chosen = set_choice(q, reach, zero, scale_dtype, mx_mode);
  Tensor codes = set_codes(q, pack);
  quantize(q);
  return {codes, chosen.scales, chosen.zeros};
}

Tensor fake_quantize_op(const Tensor& x, const Tensor& table, const Tensor& steps, const Tensor& order,
                        int64_t nan_code, int64_t rule, int64_t n, int64_t k, int64_t block_n, int64_t block_k,
                        double reach, int64_t zero, ScalarType scale_dtype, int64_t mx_mode) {
  Tensor dense;
  Quantize q = of_dense(x, n, k, block_n, block_k, dense);
  read_format(table, steps, order, nan_code, rule, q.format);
  const ChosenTensors chosen = set_choice(q, reach, zero, scale_dtype, mx_mode);
  Tensor y = make({q.blocks.matrices * q.blocks.n, k}, x.scalar_type());
  q.y = y.mutable_data_ptr();
  fake_quantize(q);
  return y;
}

Tensor block_absmax_op(const Tensor& x, int64_t n, int64_t k, int64_t block_n, int64_t block_k) {
  Tensor dense;
  Quantize q = of_dense(x, n, k, block_n, block_k, dense);
  const Blocks& b = q.blocks;
  Tensor greatest = make({b.matrices, b.bands, b.groups}, ScalarType::Float);
  q.scale = greatest.mutable_data_ptr();
  block_absmax(q);
  return greatest;
}

// Scales, and zero points if there are any, of blocks that are there already.
struct ScaleTensors {
  Tensor scale;
  std::optional<Tensor> zero;
  Scale scale_type;
  Zero zero_type = Zero::none;

  const void* zero_data() const { return zero ? zero->const_data_ptr() : nullptr; }
};

ScaleTensors read_scales(const Blocks& b, const Tensor& scale, const std::optional<Tensor>& zero) {
  const int64_t count = b.matrices * b.bands * b.groups;
  const Scale type = scale_of("scale", scale);
  check_numel("scale", scale, count, "one per block");
  ScaleTensors found{readable("scale", scale), std::nullopt, type};
  if (zero) {
    found.zero_type = zero_of("zero_point", *zero);
    check_numel("zero_point", *zero, count, "one per block");
    found.zero = readable("zero_point", *zero);
  }
  return found;
}

// Scales and zero points that there are, as those of blocks.
ScaleTensors set_scales(Quantize& q, const Tensor& scale, const std::optional<Tensor>& zero) {
  ScaleTensors scales = read_scales(q.blocks, scale, zero);
  q.scale_type = scales.scale_type;
  q.zero_type = scales.zero_type;
  q.zero_kind = zero ? ZeroKind::number : ZeroKind::none;
  q.scale = const_cast<void*>(scales.scale.const_data_ptr());
  q.zero = const_cast<void*>(scales.zero_data());
  return scales;
}

Tensor round_scaled_op(const Tensor& x, const Tensor& scale, const Tensor& table, const Tensor& steps,
                       const Tensor& order, int64_t nan_code, int64_t rule, int64_t n, int64_t k, int64_t block_n,
                       int64_t block_k) {
  Tensor dense;
  Quantize q = of_dense(x, n, k, block_n, block_k, dense);
  read_format(table, steps, order, nan_code, rule, q.format);
  const ScaleTensors scales = set_scales(q, scale, std::nullopt);
  Tensor y = make({q.blocks.matrices * q.blocks.n, k}, x.scalar_type());
  q.y = y.mutable_data_ptr();
  round_scaled(q);
  return y;
}

Tensor encode_op(const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero,
                 const Tensor& table, const Tensor& steps, const Tensor& order, int64_t nan_code,
                 int64_t rule, int64_t n, int64_t k, int64_t block_n, int64_t block_k, bool pack) {
  Tensor dense;
  Quantize q = of_dense(x, n, k, block_n, block_k, dense);
  read_format(table, steps, order, nan_code, rule, q.format);
  const ScaleTensors scales = set_scales(q, scale, zero);
  Tensor codes = set_codes(q, pack);
  encode(q);
  return codes;
}

// What dequantize and error_sums share; the tensors keep the memory that `d` points to.
struct Coded {
  Dequantize d{};
  Tensor codes;
  ScaleTensors scales;
};

Coded read_coded(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& zero,
                 const Tensor& table, int64_t n, int64_t k, int64_t block_n, int64_t block_k,
                 bool packed, ScalarType dtype) {
  Dequantize d{};
  d.type = element_of("dtype", dtype);
  read_table(table, d.format);
  finish_format(d.format);
  check_dtype("codes", codes, {ScalarType::Byte});
  check_sizes(n, k);
  d.code_bits = packed ? d.format.bits : 8;
  d.row_bytes = packed_size(k, d.code_bits);
  d.blocks = read_blocks(rows_of("codes", codes, d.row_bytes), n, k, block_n, block_k);
  Coded coded{d, readable("codes", codes), read_scales(d.blocks, scale, zero)};
  coded.d.codes = static_cast<const uint8_t*>(coded.codes.const_data_ptr());
  coded.d.scale = coded.scales.scale.const_data_ptr();
  coded.d.scale_type = coded.scales.scale_type;
  coded.d.zero = coded.scales.zero_data();
  coded.d.zero_type = coded.scales.zero_type;
  return coded;
}

Tensor dequantize_op(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& zero,
                     const Tensor& table, int64_t n, int64_t k, int64_t block_n, int64_t block_k,
                     bool packed, ScalarType dtype) {
  Coded coded = read_coded(codes, scale, zero, table, n, k, block_n, block_k, packed, dtype);
  Dequantize& d = coded.d;
  Tensor y = make({d.blocks.matrices * d.blocks.n, k}, dtype);
  d.y = y.mutable_data_ptr();
  dequantize(d);
  return y;
}

Tensor decode_codebooks_op(const Tensor& codes, const Tensor& codebooks, int64_t bits, int64_t n, int64_t k,
                           int64_t block_n, int64_t block_k, bool packed, ScalarType dtype) {
  check_range("bits", bits, 1, 8);
  Dequantize d{};
  d.type = element_of("dtype", dtype), d.codebooks = true, d.format.bits = static_cast<int32_t>(bits);
  check_dtype("codes", codes, {ScalarType::Byte});
  check_sizes(n, k);
  d.code_bits = packed ? d.format.bits : 8;
  d.row_bytes = packed_size(k, d.code_bits);
  d.blocks = read_blocks(rows_of("codes", codes, d.row_bytes), n, k, block_n, block_k);
  const Blocks& b = d.blocks;
  check_numel("codebooks", codebooks, (b.matrices * b.bands * b.groups) << bits, "one per code of every block");
  d.scale_type = scale_of("codebooks", codebooks);
  const Tensor kept = readable("codes", codes), values = readable("codebooks", codebooks);
  d.codes = static_cast<const uint8_t*>(kept.const_data_ptr()), d.scale = values.const_data_ptr();
  Tensor y = make({b.matrices * b.n, k}, dtype);
  d.y = y.mutable_data_ptr();
  dequantize(d);
  return y;
}

Tensor error_sums_op(const Tensor& x, const Tensor& codes, const Tensor& scale,
                     const std::optional<Tensor>& zero, const Tensor& table, int64_t n, int64_t k,
                     int64_t block_n, int64_t block_k, bool packed, ScalarType dtype,
                     int64_t step) {
  Coded coded = read_coded(codes, scale, zero, table, n, k, block_n, block_k, packed, dtype);
  Dequantize& d = coded.d;
  d.x_type = element_of("x", x);
  AO_CHECK(x.dim() > 0, "x: must have a dimension");
  check_numel("x", x, d.blocks.matrices * d.blocks.n * k, "as many as there are codes");
  check_range("step", step, 1, kGreatestSize);
  const Tensor dense = readable("x", x);
  d.x = dense.const_data_ptr();
  d.step = step;
  // without gaps all rows are one run
  d.run = step == 1 ? x.numel() : x.numel() / x.size(0);
  d.counted = step == 1 ? x.numel() : (x.size(0) + step - 1) / step * d.run;
  Tensor sums = make({2}, ScalarType::Double);
  error_sums(d, static_cast<double*>(sums.mutable_data_ptr()));
  return sums;
}

// Formats of quantize_rows, as Spec("int8", (1, WHOLE)) and so on have them.
Format row_format(int64_t act) {
  Format f{};
  f.bits = 8;
  for (int u = 0; u < 256; ++u) {
    f.table[u] = static_cast<float>(act == 1 ? static_cast<int8_t>(u) : u);
  }
  f.rule = act <= 2 ? Rule::integer : Rule::floating;
  if (act > 2) {
    f.mantissa = act == 3 ? 3 : 2;
    f.smallest_normal = act == 3 ? 0x1p-6f : 0x1p-14f;
    f.nan_code = 0x7f;
  }
  f.greatest = act == 1 ? 127.0f : act == 2 ? 255.0f : act == 3 ? 448.0f : 57344.0f;
  f.least = act == 1 ? -128.0f : act == 2 ? 0.0f : -f.greatest;
  return f;
}

std::tuple<Tensor, Tensor, Tensor> quantize_rows_op(const Tensor& x, int64_t act) {
  Quantize q{};
  q.type = element_of("x", x);
  check_dim("x", x, 2);
  check_range("act", act, 1, 4);
  AO_CHECK(x.numel() > 0, "x: is empty");
  const Tensor dense = readable("x", x);
  const int64_t rows = x.size(0), k = x.size(1);
  q.x = dense.const_data_ptr();
  q.blocks = blocks_of(1, rows, k, 1, k);
  q.format = row_format(act);
  q.zero_kind = act == 2 ? ZeroKind::code : ZeroKind::none;
  q.zero_type = act == 2 ? Zero::u8 : Zero::none;
  q.scale_type = Scale::f32;
  q.reach = act <= 2 ? 127.5f : q.format.greatest;
  Tensor codes = set_codes(q, false);
  Tensor scale = make({rows, 1}, ScalarType::Float);
  Tensor zero = make({act == 2 ? rows : 0, 1}, ScalarType::Byte);
  q.scale = scale.mutable_data_ptr();
  q.zero = zero.mutable_data_ptr();
  quantize(q);
  return {codes, scale, zero};
}

}  // namespace
}  // namespace ao

// Blocks: x is matrices of n rows and k columns, in blocks of block_n x block_k. Formats: `table` has
// the value of every code; the numbers from key `steps[i]` on have code `order[i + 1]`; rule: 0 search,
// 1 nearest integer, 2 rounded float. zero_point: 0 none, 1 code, 2 number, 3 number from the center.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "quantize(Tensor x, Tensor table, Tensor steps, Tensor order, int nan_code, int rule, int n, "
      "int k, int block_n, int block_k, float quant_max, int zero_point, ScalarType scale_dtype, int mx_mode, "
      "bool pack) -> (Tensor, Tensor, Tensor)");
  m.def(
      "fake_quantize(Tensor x, Tensor table, Tensor steps, Tensor order, int nan_code, int rule, int n, "
      "int k, int block_n, int block_k, float quant_max, int zero_point, ScalarType scale_dtype, int mx_mode) "
      "-> Tensor");
  m.def(
      "round_scaled(Tensor x, Tensor scale, Tensor table, Tensor steps, Tensor order, int nan_code, int rule, int n, "
      "int k, int block_n, int block_k) -> Tensor");
  m.def("block_absmax(Tensor x, int n, int k, int block_n, int block_k) -> Tensor");
  m.def(
      "encode(Tensor x, Tensor scale, Tensor? zero_point, Tensor table, Tensor steps, Tensor order, "
      "int nan_code, int rule, int n, int k, int block_n, int block_k, bool pack) -> Tensor");
  m.def(
      "dequantize(Tensor codes, Tensor scale, Tensor? zero_point, Tensor table, int n, int k, int block_n, "
      "int block_k, bool packed, ScalarType dtype) -> Tensor");
  m.def(
      "decode_codebooks(Tensor codes, Tensor codebooks, int bits, int n, int k, int block_n, int block_k, bool packed, "
      "ScalarType dtype) -> Tensor");
  m.def(
      "error_sums(Tensor x, Tensor codes, Tensor scale, Tensor? zero_point, Tensor table, int n, int k, "
      "int block_n, int block_k, bool packed, ScalarType dtype, int step) -> Tensor");
  m.def("quantize_rows(Tensor x, int act) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) {
  m.impl("quantize", TORCH_BOX(&ao::quantize_op));
  m.impl("fake_quantize", TORCH_BOX(&ao::fake_quantize_op));
  m.impl("round_scaled", TORCH_BOX(&ao::round_scaled_op));
  m.impl("block_absmax", TORCH_BOX(&ao::block_absmax_op));
  m.impl("encode", TORCH_BOX(&ao::encode_op));
  m.impl("dequantize", TORCH_BOX(&ao::dequantize_op));
  m.impl("decode_codebooks", TORCH_BOX(&ao::decode_codebooks_op));
  m.impl("error_sums", TORCH_BOX(&ao::error_sums_op));
  m.impl("quantize_rows", TORCH_BOX(&ao::quantize_rows_op));
}
