// Probe of cluster launch control: CTAs that run take over those that have not started.
#include "probe.h"

struct work_args {
    const uint32_t *in;
    uint32_t *out; // [CTAs]: how often each index of the grid was done
};

FA4_PROBE(128) fa4_probe_work(const __grid_constant__ work_args args)
{
    probe_smem &s = shared_memory();
    if (threadIdx.x == 0) {
        const uint32_t full = shared_address(&s.full), response = shared_address(s.data);
        mbarrier_init(full, 1);
        fence_mbarrier_init();
        uint32_t index = blockIdx.x, more = 1;
        for (uint32_t parity = 0; more; parity ^= 1) {
            atomicAdd(args.out + index, 1);
            mbarrier_arrive_expect_tx(full, 16);
            asm volatile(
                "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];"
                :
                : "r"(response), "r"(full)
                : "memory");
            mbarrier_wait(full, parity);
            asm volatile("{\n\t"
                         ".reg .b128 answer;\n\t"
                         ".reg .pred p;\n\t"
                         "ld.shared.b128 answer, [%2];\n\t"
                         "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, answer;\n\t"
                         "selp.u32 %0, 1, 0, p;\n\t"
                         "@p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, answer;\n\t"
                         "}"
                         : "=r"(more), "+r"(index)
                         : "r"(response)
                         : "memory");
            fence_proxy_async_shared();
        }
    }
}
