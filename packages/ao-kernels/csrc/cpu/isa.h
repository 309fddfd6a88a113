// The kernels of one instruction set, and the choice of the set that this processor runs.
#pragma once

#include "attend/kernels.h"
#include "block/kernels.h"
#include "cache/kernels.h"
#include "dense/kernels.h"
#include "hadamard/kernels.h"
#include "linear/kernels.h"
#include "optim/program.h"
#include "quantize/kernels.h"
#include "sparse/kernels.h"
#include "sums/kernels.h"
#include "trellis/kernels.h"

namespace ao {

// One for each unit isa_NAME.cpp; a unit shares nothing else with the rest of the library.
struct Isa {
  const char* name;
  LinearKernels linear;
  QuantizeKernels quantize;
  OptimKernels optim;
  ProgramKernels programs;
  SparseKernels sparse;
  HadamardKernels hadamard;
  AttendKernels attend;
  BlockKernels block;
  CacheKernels cache;
  TrellisKernels trellis;
  DenseKernels dense;
  SumsKernels sums;
};

// Of a set that has all others from another one.
struct ProductKernels {
  LinearKernels linear;
  AttendKernels attend;
};

// The set in use: the best one that the processor has, or the one that AO_CPU_ISA names. It is
// chosen once; where AO_CPU_ISA is wrong it is the best one, and isa_error() says what is wrong.
const Isa& isa();

// The names of all sets that the processor has, the best one first: "avx512, avx512_vnni, avx2, generic".
const char* usable_isas();

// Whether int16 dot products are faster than those of bfloat16, where there are both. Intel's vector units make the
// latter at a fourth of the rate, because AMX units are there for them; elsewhere both have the same rate, and bfloat16
// needs no scales in between.
bool prefers_words();

// nullptr, or a sentence that says why AO_CPU_ISA cannot be obeyed.
const char* isa_error();

}  // namespace ao
