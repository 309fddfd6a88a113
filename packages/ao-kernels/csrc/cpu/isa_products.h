// The body of a unit that has the kernels bound by products of its own, and all others from another set. It defines AO_ISA
// and includes the vectors first.
#pragma once

#include "isa.h"
#include "attend/unit.h"
#include "linear/columns.h"

#define AO_JOIN2(a, b) a##b
#define AO_JOIN(a, b) AO_JOIN2(a, b)

namespace ao {

extern const ProductKernels AO_JOIN(isa_, AO_ISA);
const ProductKernels AO_JOIN(isa_, AO_ISA) = {AO_ISA::kLinearKernels, AO_ISA::attention::kAttendKernels};

}  // namespace ao
