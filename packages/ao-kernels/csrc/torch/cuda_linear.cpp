// Matmuls with weights in the layout plane16 on NVIDIA's GPUs: for few rows of activations.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#ifdef __linux__
#include <dlfcn.h>
#endif

#include <string>
#include <vector>

#include "cuda/driver.h"
#include "formats.h"

namespace ao {
namespace {

using gpu::Number;
using gpu::Storage;

Number number_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Number::f32;
    case ScalarType::BFloat16: return Number::bf16;
    case ScalarType::Half: return Number::f16;
    default: break;
  }
  fail(name, ": has dtype ", dtype_name(tensor.scalar_type()), "; must be one of Float, BFloat16, Half");
}

void check_device(const char* name, const Tensor& tensor, const Tensor& x) {
  check_defined(name, tensor);
  AO_CHECK(tensor.device() == x.device(), name, ": must be on the device of x");
  check_contiguous(name, tensor);
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  AO_CHECK(address % 16 == 0, name, ": its memory is not aligned to 16 bytes");
}

Storage storage_of(int64_t format, int plane, Number zero) {
  if (format == 1) return Storage::int8;
  if (format == 2) return Storage::f8e4m3;
  const bool sums = zero != Number::none && zero != Number::u8;
  if (plane == 32) return sums ? Storage::int4_g32_sums : Storage::int4_g32;
  return sums ? Storage::int4_sums : Storage::int4;
}

gpu::Sizes sizes_of(int64_t m, int64_t n, int64_t k, int64_t group, int64_t format, Number scale, Number zero) {
  check_range("n", n, 1, (int64_t{1} << 31) - 1024);
  check_range("k", k, 1, (int64_t{1} << 31) - 1024);
  check_range("format", format, 0, 2);
  check_range("group", group, 1, kGreatestSize);
  const int bits = format == 0 ? 4 : 8;
  if (group < k) {
    const bool known = group == 64 || group == 128 || (bits == 4 && (group == 32 || group == 256));
    AO_CHECK(known, "group=", group, ": must be 64, 128, for int4 also 32 or 256, or k and more");
  }
  AO_CHECK(zero == Number::none || (bits == 4 && group < k), "zero_point: is for int4 in groups");
  return {m, n, k, group, bits, scale, zero};
}

// A tensor like x (…, k), but (…, n).
Tensor make_result(const Tensor& x, int64_t n) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end()), strides(shape.size(), 1);
  shape.back() = n;
  for (size_t i = shape.size(); i > 1; --i) strides[i - 2] = strides[i - 1] * (shape[i - 1] > 0 ? shape[i - 1] : 1);
  int32_t dtype = 0, type = 0, index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &index));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                         strides.data(), dtype, type, index, &made));
  return Tensor(made);
}

// Activations (m, k) whose rows begin at multiples of 16 bytes.
Tensor rows_of_16_bytes(const Tensor& x, int64_t m, int64_t k) {
  const bool matrix = x.dim() == 2 && x.stride(1) == 1 && x.stride(0) >= k;
  Tensor rows = matrix ? x : torch::stable::reshape(torch::stable::contiguous(x), {m, k});
  const bool aligned = reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0;
  if (aligned && (m == 1 || rows.stride(0) % 8 == 0)) return rows;
  if (k % 8 == 0) return torch::stable::clone(torch::stable::contiguous(rows));
  return torch::stable::pad(rows, {0, 8 - k % 8});
}

// The current stream of a device of NVIDIA: torch's own part for CUDA knows it, which is loaded where x is.
void* stream_of(int32_t device) {
#ifdef __linux__
  using Find = AOTITorchError (*)(int32_t, void**);
  static const Find find = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Find>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr);
  }();
  AO_CHECK(find, "x: this torch has no part for CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(find(device, &stream));
  return stream;
#else
  fail("x: there are CUDA kernels on Linux only, not for device ", device);
#endif
}

Tensor cuda_linear_op(const Tensor& x, const Tensor& qdata, const Tensor& scale,
                      const std::optional<Tensor>& zero_point, const std::optional<Tensor>& bias, int64_t n, int64_t k,
                      int64_t group, int64_t format) {
  check_defined("x", x);
  check_dtype("x", x, {ScalarType::BFloat16, ScalarType::Half});
  AO_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) == k, "x: has shape ", shape_text(x), "; must end with k=", k);
  const int64_t m = x.numel() / (k ? k : 1);
  AO_CHECK(m <= gpu::kMostRows, "x: has ", m, " rows; must have at most ", gpu::kMostRows);
  check_device("qdata", qdata, x);
  check_device("scale", scale, x);
  Number zero = Number::none;
  if (zero_point) {
    check_device("zero_point", *zero_point, x);
    zero = zero_point->scalar_type() == ScalarType::Byte ? Number::u8 : number_of("zero_point", *zero_point);
  }
  const gpu::Sizes sizes = sizes_of(m, n, k, group, format, number_of("scale", scale), zero);
  const bool sums = zero != Number::none && zero != Number::u8;
  AO_CHECK(!sums || m <= gpu::kMostRowsWithSums, "x: has ", m, " rows; must have at most ", gpu::kMostRowsWithSums,
           " with zero points that are floats");
  Tensor y = make_result(x, n);
  const int32_t device = x.get_device_index();
  const gpu::Device there = gpu::device_of(device);
  const gpu::Plan plan = gpu::plan(sizes, there);
  AO_CHECK(plan.shared <= there.shared_of_cta, "x: with ", m, " rows a CTA needs ", plan.shared,
           " bytes of shared memory, and the device has ", there.shared_of_cta);
  gpu::Linear call = plan.call;
  check_dtype("qdata", qdata, {ScalarType::Short});
  const int64_t blocks = (n + gpu::kTileN - 1) / gpu::kTileN, groups = call.groups_per_tile ? call.groups_per_tile * call.k_tiles : 1;
  check_numel("qdata", qdata, blocks * call.k_tiles * gpu::kTileN * plan.plane, "of tiles of 128 of N");
  check_numel("scale", scale, blocks * groups * gpu::kTileN, "128 for each group of each block of 128 of N");
  if (zero_point) check_numel("zero_point", *zero_point, scale.numel(), "as scale");
  if (m == 0) return y;
  std::optional<Tensor> added;
  if (bias) {
    check_dtype("bias", *bias, {x.scalar_type()});
    check_numel("bias", *bias, n, "one per row of the weight");
    added = torch::stable::contiguous(*bias);
  }
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor rows = rows_of_16_bytes(x, m, k);
  call.x_stride = m == 1 ? 0 : rows.stride(0);
  AO_CHECK(call.x_stride < (1 << 25), "x: its rows are ", call.x_stride, " elements apart; must be less than 2^25");
  call.x = rows.const_data_ptr(), call.qdata = qdata.const_data_ptr(), call.scale = scale.const_data_ptr();
  call.zero = zero_point ? zero_point->const_data_ptr() : nullptr;
  call.bias = added ? added->const_data_ptr() : nullptr;
  call.out = y.mutable_data_ptr();
  const bool bfloat16 = x.scalar_type() == ScalarType::BFloat16;
  gpu::launch(storage_of(format, plan.plane, zero), bfloat16, plan, call, device, stream_of(device));
  return y;
}

std::string cuda_unavailable_op() { return gpu::unavailable(); }

// What `explain` tells before there is a matmul: slabs of 32 of N and splits of K, stages, and bytes of shared memory of a
// CTA; the device is told by its SMs, its shared memory of a CTA and of an SM, and whether it is sm_90 or later.
std::vector<int64_t> cuda_plan_op(int64_t m, int64_t n, int64_t k, int64_t group, int64_t format, int64_t scale_bytes,
                                  int64_t zero_bytes, std::vector<int64_t> device) {
  check_range("m", m, 1, gpu::kMostRows);
  AO_CHECK(device.size() == 4, "device: has ", device.size(), " numbers; must have 4");
  const Number scale = scale_bytes == 4 ? Number::f32 : Number::bf16;
  const Number zeros[] = {Number::none, Number::u8, Number::bf16, Number::none, Number::f32};
  check_range("zero_bytes", zero_bytes, 0, 4);
  const auto number = [&](size_t i) { return static_cast<int32_t>(device[i]); };
  const gpu::Plan plan = gpu::plan(sizes_of(m, n, k, group, format, scale, zeros[zero_bytes]),
                                   {number(0), number(1), number(2), device[3] != 0});
  return {plan.block_m, plan.call.n_warps, plan.splits, plan.call.stages, plan.shared};
}

}  // namespace
}  // namespace ao

STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def(
      "cuda_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? zero_point, Tensor? bias, int n, int k, int group, "
      "int format) -> Tensor");
  m.def("cuda_unavailable() -> str");
  m.def(
      "cuda_plan(int m, int n, int k, int group, int format, int scale_bytes, int zero_bytes, int[] device) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CUDA, m) { m.impl("cuda_linear", TORCH_BOX(&ao::cuda_linear_op)); }

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CompositeExplicitAutograd, m) {
  m.impl("cuda_unavailable", TORCH_BOX(&ao::cuda_unavailable_op));
  m.impl("cuda_plan", TORCH_BOX(&ao::cuda_plan_op));
}
