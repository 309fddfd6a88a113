// What happens when the library is loaded, and the ops that belong to no kind of kernel.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <unistd.h>

#include <string>

#include "checks.h"
#include "isa.h"
#include "parallel.h"

namespace ao {
namespace {

int torch_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

// The process that loaded the library. A fork of it may have none of the threads that torch's pool
// counts on, and OpenMP would wait for them for ever: there one thread does all.
const pid_t loader = getpid();

void torch_parallel(int64_t begin, int64_t end, int64_t grain, Body body, void* context) {
  if (getpid() != loader) return body(begin, end, context);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, body, context));
}

std::string cpu_isa() {
  if (const char* error = isa_error()) fail(error);
  return isa().name;
}

// torch's pool serves all kernels: torch.set_num_threads holds, and no second pool is started
const bool host_is_set = [] {
  set_host({torch_parallel, torch_threads});
  return true;
}();

}  // namespace
}  // namespace ao

// Each file of ops adds to the namespace in a fragment of its own.
STABLE_TORCH_LIBRARY_FRAGMENT(ao_kernels, m) { m.def("cpu_isa() -> str"); }

STABLE_TORCH_LIBRARY_IMPL(ao_kernels, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&ao::cpu_isa));
}
