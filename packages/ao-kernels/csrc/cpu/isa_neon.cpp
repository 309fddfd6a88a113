#define AO_ISA neon
#include "isa_unit.h"
