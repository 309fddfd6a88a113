#define AO_ISA generic
#include "isa_unit.h"
