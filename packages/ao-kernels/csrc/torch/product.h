// A weight in tiles and its activations, as arguments of ops, checked.
#pragma once

#include "affine.h"
#include "linear/linear.h"

namespace ao {

// Does every value survive being rounded to bfloat16?
inline bool exact_in_bfloat16(const float* table, int64_t codes) {
  uint32_t lost = 0;
  for (int64_t c = 0; c < codes; ++c) lost |= std::bit_cast<uint32_t>(table[c]) & 0xffff;
  return lost == 0;
}

// What may be assumed of the table, after a look at whether it is true.
inline Kind kind_of(int64_t kind, const float* table, int64_t bits) {
  check_range("kind", kind, 0, 2);
  const int64_t codes = int64_t{1} << bits;
  bool true_to_kind = true;
  if (kind == 1) {
    for (int64_t c = 0; c < codes; ++c) true_to_kind &= table[c] == table[0] + static_cast<float>(c);
    true_to_kind &= table[0] >= -128 && table[0] <= 0;
    AO_CHECK(true_to_kind, "table: its values do not count up by 1 from -128..0, which kind=1 means");
    return Kind::integer;
  }
  if (kind == 2 && bits == 8) {
    for (int64_t c = 0; c < 128; ++c) {
      true_to_kind &= table[c + 128] == -table[c] || table[c] != table[c];
    }
    AO_CHECK(true_to_kind && exact_in_bfloat16(table, codes),
             "table: is not symmetric around 0 and exact in bfloat16, which kind=2 means");
    return Kind::symmetric;
  }
  return bits <= 6 && exact_in_bfloat16(table, codes) ? Kind::exact : Kind::table;
}

// Activations in int8 meet codes as bytes: values must be whole and fit them.
inline void check_integers(const float* table, int64_t bits, Kind kind, int64_t act) {
  if (kind == Kind::integer) return;
  bool whole = bits <= 4;
  for (int64_t c = 0; whole && c < int64_t{1} << bits; ++c) {
    whole = table[c] >= -64 && table[c] <= 63 && table[c] == static_cast<float>(static_cast<int>(table[c]));
  }
  AO_CHECK(whole, "act=", act, ": activations in 8-bit integers need a table of integers");
}

// A weight, its activations, and the tensors that keep what it points to.
struct Product {
  Linear call{};
  std::vector<Tensor> kept;
  int64_t experts = 1, row_blocks = 0;

  const void* keep(const Tensor& tensor) {
    kept.push_back(tensor);
    return tensor.const_data_ptr();
  }

  void read_weight(const Tensor& qdata, const QuantParamTensors& affine, const Optional& rowsum, const Tensor& table,
                   int64_t n, int64_t k, int64_t bits, int64_t group, int64_t kind, int64_t act,
                   StoredAs stored = StoredAs::tiles, int64_t fill = 0) {
    kept.reserve(8);
    check_sizes(n, k);
    check_range("bits", bits, 1, 8);
    check_range("group", group, 1, k);
    check_range("act", act, 0, 4);
    call.n = n, call.k = k, call.bits = static_cast<int32_t>(bits), call.group = group;
    call.groups = (k + group - 1) / group;
    call.tiles = (call.groups - 1) * ((group + 15) / 16) + (k - (call.groups - 1) * group + 15) / 16;
    call.act = static_cast<Act>(act);
    call.stored = stored, call.fill = static_cast<int32_t>(fill);
    row_blocks = (n + 15) / 16;

    check_dtype("qdata", qdata, {ScalarType::Byte});
    check_numel("qdata", qdata, experts * row_blocks * stored_bytes(call),
                stored == StoredAs::tiles ? "blocks of 16 rows x tiles of 16 columns x 32 bytes per bit"
                                        : "blocks of 16 rows x bytes of their tiles as they are stored");
    call.qdata = static_cast<const uint8_t*>(keep(readable("qdata", qdata)));
    read_quant_params(affine, experts * row_blocks * 16, call, kept);
    AO_CHECK(call.zero_type != Zero::u8 || kind == 1, "zero_point: codes of zero points need kind=1, not ", kind);
    AO_CHECK(rowsum || call.act != Act::uint8, "rowsum: is needed with act=2");
    if (rowsum) {
      check_dtype("rowsum", *rowsum, {ScalarType::Float});
      check_numel("rowsum", *rowsum, experts * row_blocks * 16, "one per row of every block");
      call.rowsum = static_cast<const float*>(keep(readable("rowsum", *rowsum)));
    }
    check_values(table);
    check_numel("table", table, int64_t{1} << bits, "one per code of `bits`");
    call.table = static_cast<const float*>(keep(readable("table", table)));
    call.kind = kind_of(kind, call.table, bits);
    if (call.act == Act::int8 || call.act == Act::uint8) check_integers(call.table, bits, call.kind, act);
  }

  // A scale of all activations, and a zero point, which are calibrated.
  void take_static(const Tensor& scale, const Optional& zero) {
    AO_CHECK(call.act != Act::none, "act_scale: is for activations that are quantized, and act=0");
    check_dtype("act_scale", scale, {ScalarType::Float});
    check_numel("act_scale", scale, 1, "one for all activations");
    call.given_scale = *static_cast<const float*>(readable("act_scale", scale).const_data_ptr());
    AO_CHECK(call.given_scale >= 0x1p-126f && call.given_scale <= 3.40282347e38f, "act_scale: is ", call.given_scale,
             "; must be a normal number above 0");
    AO_CHECK(zero.has_value() == (call.act == Act::uint8), "act_zero_point: goes with act=2, and only with it");
    if (!zero) return;
    check_dtype("act_zero_point", *zero, {ScalarType::Byte});
    check_numel("act_zero_point", *zero, 1, "one for all activations");
    call.given_zero = *static_cast<const uint8_t*>(readable("act_zero_point", *zero).const_data_ptr());
  }

  // x (..., k) as rows; returns them, contiguous along k.
  void read_activations(const Tensor& x, Tensor& y) {
    call.type = *element_of(x.scalar_type());
    const bool rows = x.dim() == 2 && x.stride(1) == 1 && x.stride(0) >= x.size(1) && x.is_cpu();
    if (rows) check_aligned("x", x);
    call.x = keep(rows ? x : readable("x", x));
    call.x_stride = rows ? x.stride(0) : call.k;
    call.m = call.k ? x.numel() / call.k : 0;
    call.y = y.mutable_data_ptr();
    call.y_stride = call.n;
  }

  // The same for the rows and the weight of one expert.
  void run_expert(int64_t expert, int64_t begin, int64_t end) const {
    Linear t = call;
    const int64_t size = bytes_of(t.type);
    t.qdata += expert * row_blocks * t.tiles * 32 * t.bits;
    to_block(t, expert * row_blocks);
    if (t.rowsum) t.rowsum += expert * row_blocks * 16;
    t.x = static_cast<const uint8_t*>(t.x) + begin * t.x_stride * size;
    t.y = static_cast<uint8_t*>(t.y) + begin * t.y_stride * size;
    t.m = end - begin;
    run_linear(t);
  }
};

inline void check_x(const Tensor& x) {
  check_cpu("x", x);
  check_dtype("x", x, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  AO_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) >= 1, "x: has shape ", shape_text(x),
           ", no columns to multiply along");
}

}  // namespace ao
