// fa4_fwd_plan: params of any CUDA backend to the launch that runs them. No CUDA header: the simulator calls this too.
#include "../error.h"
#include "backend.h"

#include <string.h>

fa4_status fa4_fwd_plan(const fa4_fwd_params *p, const fa4_chip *chip, fa4_plan *plan)
{
    const char *reason = fa4_fwd_unsupported(p, chip->arch);
    if (reason) return fa4_fail(FA4_UNSUPPORTED, "%s", reason);
    (chip->arch == 90 ? fa4_sm90_fwd_plan : fa4_sm100_fwd_plan)(p, chip, plan);
    return FA4_OK;
}
