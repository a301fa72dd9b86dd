// bwd.c in double.
#define FA4_CPU_F64
#include "bwd.c"
