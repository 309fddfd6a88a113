// The body of every unit isa_NAME.cpp, which defines AO_ISA as NAME and includes this, nothing else.
//
// A unit is compiled with flags of its own. So that no function compiled for a better processor is
// ever run on another one, everything here is in the namespace of the set and of internal linkage,
// and headers of the C++ standard library are not included: the linker would keep only one copy of
// their inline functions, whichever unit it came from.
#pragma once

#include "isa.h"
#include "optim/unit.h"
#include "quantize/unit.h"

#define AO_JOIN2(a, b) a##b
#define AO_JOIN(a, b) AO_JOIN2(a, b)
#define AO_TEXT2(a) #a
#define AO_TEXT(a) AO_TEXT2(a)

#if __has_include(AO_TEXT(simd/AO_ISA.h))
#include AO_TEXT(simd/AO_ISA.h)
#include "block/unit.h"
#include "cache/unit.h"
#include "dense/unit.h"
#include "hadamard/unit.h"
#include "attend/unit.h"
#include "linear/columns.h"
#include "optim/program_unit.h"
#include "sparse/unit.h"
#include "sums/unit.h"
#include "trellis/unit.h"
#define AO_LINEAR AO_ISA::kLinearKernels
#define AO_SPARSE AO_ISA::kSparseKernels
#define AO_HADAMARD AO_ISA::rotation::kHadamardKernels
#define AO_ATTEND AO_ISA::attention::kAttendKernels
#define AO_BLOCK AO_ISA::block::kBlockKernels
#define AO_TRELLIS AO_ISA::trellis::kTrellisKernels
#define AO_CACHE AO_ISA::cache::kCacheKernels
#define AO_DENSE AO_ISA::dense::kDenseKernels
#define AO_SUMS AO_ISA::sums::kSumsKernels
#define AO_PROGRAMS AO_ISA::programs::kProgramKernels
#else
#define AO_LINEAR LinearKernels{}
#define AO_SPARSE SparseKernels{}
#define AO_HADAMARD HadamardKernels{}
#define AO_ATTEND AttendKernels{}
#define AO_BLOCK BlockKernels{}
#define AO_TRELLIS TrellisKernels{}
#define AO_CACHE CacheKernels{}
#define AO_DENSE DenseKernels{}
#define AO_SUMS SumsKernels{}
#define AO_PROGRAMS ProgramKernels{}
#endif

namespace ao {

extern const Isa AO_JOIN(isa_, AO_ISA);
const Isa AO_JOIN(isa_, AO_ISA) = {AO_TEXT(AO_ISA), AO_LINEAR, AO_ISA::coding::kQuantizeKernels,
                                     AO_ISA::optim::kOptimKernels, AO_PROGRAMS, AO_SPARSE, AO_HADAMARD, AO_ATTEND,
                                     AO_BLOCK, AO_CACHE, AO_TRELLIS, AO_DENSE, AO_SUMS};

}  // namespace ao
