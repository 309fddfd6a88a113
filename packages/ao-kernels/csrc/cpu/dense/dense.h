// Matmuls with dense weights on all threads.
#pragma once
#include "kernels.h"

namespace ao {

void run_dense(const Dense& call);

}  // namespace ao
