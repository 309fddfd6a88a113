// Sums of errors on all threads. Arguments have been checked.
#pragma once
#include "kernels.h"

namespace ao {

void scale_sums(const ScaleSums& call);

}  // namespace ao
