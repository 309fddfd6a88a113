// What happens when the library is loaded, and the ops that belong to no kind of kernel.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "checks.h"
#include "forked.h"
#include "invariant.h"
#include "isa.h"
#include "parallel.h"

namespace ao {
namespace {

int torch_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

void torch_parallel(int64_t begin, int64_t end, int64_t grain, Body body, void* context) {
  const auto region = [&] { STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, body, context)); };
  Forked& process = forked();
  if (!process.is) return region();
  if (end - begin <= grain || torch_threads() == 1) return body(begin, end, context);
  if (!process.deputy) process.deputy = new Deputy;
  process.deputy->run(region);
}

std::string cpu_isa() {
  if (const char* error = isa_error()) fail(error);
  return isa().name;
}

std::string usable_cpu_isas() { return usable_isas(); }

int64_t want_batch_invariant_op(int64_t change) { return want_batch_invariant(static_cast<int>(change)); }

// torch's pool serves all kernels: torch.set_num_threads holds, and no second pool is started
const bool host_is_set = [] {
  watch_forks();
  set_host({torch_parallel, torch_threads});
  return true;
}();

}  // namespace
}  // namespace ao

// Each file of ops adds to the namespace in a fragment of its own.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) {
  m.def("cpu_isa() -> str");
  m.def("usable_cpu_isas() -> str");
  m.def("want_batch_invariant(int change) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&ao::cpu_isa));
  m.impl("usable_cpu_isas", TORCH_BOX(&ao::usable_cpu_isas));
  m.impl("want_batch_invariant", TORCH_BOX(&ao::want_batch_invariant_op));
}
