#define AO_ISA avx512_vnni
#include "isa_unit.h"
