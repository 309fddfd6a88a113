#define AO_ISA avx2
#include "isa_unit.h"
