#define AO_ISA avx512
#include "isa_unit.h"
