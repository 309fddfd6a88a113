// Ops on the layout cpu_tiles: from and to rows of codes, to dense tensors, and lookup of rows.
#include <torch/csrc/stable/library.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "affine.h"

namespace ao {
namespace {

Tiles read_sizes(int64_t n, int64_t k, int64_t bits, int64_t group) {
  Tiles t{};
  check_sizes(n, k);
  check_range("bits", bits, 1, 8);
  check_range("group", group, 1, k);
  t.n = n, t.k = k, t.bits = static_cast<int32_t>(bits), t.group = group;
  set_tiles(t);
  return t;
}

// The product of all sizes but the last `drop`.
int64_t matrices_of(const Tensor& tensor, int64_t drop) {
  int64_t count = tensor.numel() == 0 ? 0 : 1;
  for (int64_t i = 0; count > 0 && i < tensor.dim() - drop; ++i) count *= tensor.size(i);
  return count;
}

// The tiles themselves: (..., row blocks, tiles of a row, bytes of a tile).
Tensor read_qdata(const Tensor& qdata, Tiles& t) {
  check_dtype("qdata", qdata, {ScalarType::Byte});
  const int64_t dim = qdata.dim();
  AO_CHECK(dim >= 3 && qdata.size(dim - 1) == 32 * t.bits && qdata.size(dim - 2) == t.tiles &&
               qdata.size(dim - 3) == t.row_blocks,
           "qdata: has shape ", shape_text(qdata), "; must end with (", t.row_blocks, ", ", t.tiles,
           ", ", 32 * t.bits, ") for n=", t.n, ", k=", t.k, ", bits=", t.bits, ", group=", t.group);
  Tensor tiles = readable("qdata", qdata);
  t.matrices = matrices_of(qdata, 3);
  t.qdata = static_cast<const uint8_t*>(tiles.const_data_ptr());
  return tiles;
}

uint8_t read_flip(int64_t flip, int64_t bits) {
  check_range("flip", flip, 0, (int64_t{1} << bits) - 1);
  return static_cast<uint8_t>(flip);
}

// Weights are read from end to end at each matmul: in pages of 2 MiB, that takes up to a third less time.
void ask_for_large_pages(void* memory, int64_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // may refuse
#endif
}

Tensor pack_tiles_op(const Tensor& packed, int64_t n, int64_t k, int64_t bits, int64_t group,
                     int64_t flip) {
  Tiles t = read_sizes(n, k, bits, group);
  t.flip = read_flip(flip, bits);
  t.row_bytes = packed_size(k, t.bits);
  check_dtype("packed", packed, {ScalarType::Byte});
  const int64_t dim = packed.dim();
  AO_CHECK(dim >= 2 && packed.size(dim - 1) == t.row_bytes && packed.size(dim - 2) == n,
           "packed: has shape ", shape_text(packed), "; must end with (", n, ", ", t.row_bytes,
           ") for n=", n, ", k=", k, ", bits=", bits);
  const Tensor rows = readable("packed", packed);
  t.matrices = matrices_of(packed, 2);
  t.packed = static_cast<const uint8_t*>(rows.const_data_ptr());
  Tensor qdata = make_like(packed, 2, {t.row_blocks, t.tiles, 32 * bits}, ScalarType::Byte);
  t.out = static_cast<uint8_t*>(qdata.mutable_data_ptr());
  ask_for_large_pages(t.out, qdata.numel());
  pack_tiles(t);
  return qdata;
}

Tensor unpack_tiles_op(const Tensor& qdata, int64_t n, int64_t k, int64_t bits, int64_t group,
                       int64_t flip) {
  Tiles t = read_sizes(n, k, bits, group);
  t.flip = read_flip(flip, bits);
  t.row_bytes = packed_size(k, t.bits);
  const Tensor tiles = read_qdata(qdata, t);
  Tensor packed = make_like(qdata, 3, {n, t.row_bytes}, ScalarType::Byte);
  t.out = static_cast<uint8_t*>(packed.mutable_data_ptr());
  unpack_tiles(t);
  return packed;
}

// A quantized tensor whose values are wanted; the tensors keep the memory that `t` points to.
struct Tiled {
  Tiles t;
  std::vector<Tensor> kept;
};

Tiled read_tiles(const Tensor& qdata, const QuantParamTensors& affine, const Tensor& table, int64_t n, int64_t k,
                 int64_t bits, int64_t group, ScalarType dtype) {
  Tiled tiled{read_sizes(n, k, bits, group), {}};
  Tiles& t = tiled.t;
  t.type = element_of("dtype", dtype);
  tiled.kept.push_back(read_qdata(qdata, t));
  read_quant_params(affine, t.matrices * t.row_blocks * 16, t, tiled.kept);
  Format format;
  read_table(table, format);
  AO_CHECK(format.bits == bits, "table: has ", table.numel(), " values; must have ", 1 << bits,
           " for bits=", bits);
  std::memcpy(t.table, format.table, sizeof(t.table));
  for (int u = 1 << bits; u < 256; ++u) t.table[u] = t.table[u & ((1 << bits) - 1)];
  // zero points are canonical codes: those of signed integers, stored from 0 on, differ in a bit
  t.flip = static_cast<uint8_t>(t.table[0] < 0 ? 1 << (bits - 1) : 0);
  return tiled;
}

Tensor dequantize_tiles_op(const Tensor& qdata, const Tensor& scale, const Optional& scale_outer, const Optional& zero,
                           const Optional& offset, const Optional& offset_outer, const Tensor& table, int64_t n,
                           int64_t k, int64_t bits, int64_t group, int64_t span, ScalarType dtype) {
  Tiled tiled =
      read_tiles(qdata, {scale, scale_outer, zero, offset, offset_outer, span}, table, n, k, bits, group, dtype);
  Tensor y = make_like(qdata, 3, {n, k}, dtype);
  tiled.t.y = y.mutable_data_ptr();
  dequantize_tiles(tiled.t);
  return y;
}

Tensor embedding_op(const Tensor& ids, const Tensor& qdata, const Tensor& scale, const Optional& scale_outer,
                    const Optional& zero, const Optional& offset, const Optional& offset_outer, const Tensor& table,
                    int64_t n, int64_t k, int64_t bits, int64_t group, int64_t span, ScalarType dtype) {
  Tiled tiled =
      read_tiles(qdata, {scale, scale_outer, zero, offset, offset_outer, span}, table, n, k, bits, group, dtype);
  Tiles& t = tiled.t;
  AO_CHECK(t.matrices == 1, "qdata: has shape ", shape_text(qdata), "; must be of one matrix");
  check_dtype("ids", ids, {ScalarType::Long, ScalarType::Int});
  const Tensor numbers = readable("ids", ids);
  const int64_t count = ids.numel();
  std::vector<int64_t> rows(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    rows[i] = ids.scalar_type() == ScalarType::Long
                  ? static_cast<const int64_t*>(numbers.const_data_ptr())[i]
                  : static_cast<const int32_t*>(numbers.const_data_ptr())[i];
    if (rows[i] < 0 || rows[i] >= n) {
      std::ostringstream text;
      text << "ids: index " << rows[i] << " is out of range; there are " << n << " rows";
      throw std::out_of_range(text.str());
    }
  }
  t.ids = rows.data();
  Tensor y = make_like(ids, 0, {k}, dtype);
  t.y = y.mutable_data_ptr();
  gather_tiles(t, count);
  return y;
}

}  // namespace
}  // namespace ao

// See the layout cpu_tiles for n, k, bits and group; flip: an exclusive or applied to every code.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def("pack_tiles(Tensor packed, int n, int k, int bits, int group, int flip) -> Tensor");
  m.def("unpack_tiles(Tensor qdata, int n, int k, int bits, int group, int flip) -> Tensor");
  m.def(
      "dequantize_tiles(Tensor qdata, Tensor scale, Tensor? scale_outer, Tensor? zero_point, Tensor? offset, "
      "Tensor? offset_outer, Tensor table, int n, int k, int bits, int group, int span, ScalarType dtype) -> Tensor");
  m.def(
      "embedding(Tensor ids, Tensor qdata, Tensor scale, Tensor? scale_outer, Tensor? zero_point, Tensor? offset, "
      "Tensor? offset_outer, Tensor table, int n, int k, int bits, int group, int span, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CPU, m) {
  m.impl("pack_tiles", TORCH_BOX(&ao::pack_tiles_op));
  m.impl("unpack_tiles", TORCH_BOX(&ao::unpack_tiles_op));
  m.impl("dequantize_tiles", TORCH_BOX(&ao::dequantize_tiles_op));
  m.impl("embedding", TORCH_BOX(&ao::embedding_op));
}
