// Special registers. PTX ISA, "Special Registers".
#include <string.h>

#include "sched.h"
#include "sim.h"

typedef enum {
    TID_X,
    TID_Y,
    TID_Z,
    NTID_X,
    NTID_Y,
    NTID_Z,
    LANEID,
    WARPID,
    NWARPID,
    CTAID_X,
    CTAID_Y,
    CTAID_Z,
    NCTAID_X,
    NCTAID_Y,
    NCTAID_Z,
    SMID,
    NSMID,
    GRIDID,
    CLUSTERID_X,
    CLUSTERID_Y,
    CLUSTERID_Z,
    NCLUSTERID_X,
    NCLUSTERID_Y,
    NCLUSTERID_Z,
    CLUSTER_CTAID_X,
    CLUSTER_CTAID_Y,
    CLUSTER_CTAID_Z,
    CLUSTER_NCTAID_X,
    CLUSTER_NCTAID_Y,
    CLUSTER_NCTAID_Z,
    CLUSTER_CTARANK,
    CLUSTER_NCTARANK,
    IS_EXPLICIT_CLUSTER,
    LANEMASK_EQ,
    LANEMASK_LE,
    LANEMASK_LT,
    LANEMASK_GE,
    LANEMASK_GT,
    CLOCK,
    CLOCK_HI,
    CLOCK64,
    GLOBALTIMER,
    GLOBALTIMER_LO,
    GLOBALTIMER_HI,
    DYNAMIC_SMEM_SIZE,
    TOTAL_SMEM_SIZE,
    AGGR_SMEM_SIZE,
    RESERVED_SMEM_BEGIN,
    RESERVED_SMEM_END,
    RESERVED_SMEM_CAP,
    SPECIALS
} special;

static const char *const names[SPECIALS] = {
    [TID_X] = "tid.x",
    [TID_Y] = "tid.y",
    [TID_Z] = "tid.z",
    [NTID_X] = "ntid.x",
    [NTID_Y] = "ntid.y",
    [NTID_Z] = "ntid.z",
    [LANEID] = "laneid",
    [WARPID] = "warpid",
    [NWARPID] = "nwarpid",
    [CTAID_X] = "ctaid.x",
    [CTAID_Y] = "ctaid.y",
    [CTAID_Z] = "ctaid.z",
    [NCTAID_X] = "nctaid.x",
    [NCTAID_Y] = "nctaid.y",
    [NCTAID_Z] = "nctaid.z",
    [SMID] = "smid",
    [NSMID] = "nsmid",
    [GRIDID] = "gridid",
    [CLUSTERID_X] = "clusterid.x",
    [CLUSTERID_Y] = "clusterid.y",
    [CLUSTERID_Z] = "clusterid.z",
    [NCLUSTERID_X] = "nclusterid.x",
    [NCLUSTERID_Y] = "nclusterid.y",
    [NCLUSTERID_Z] = "nclusterid.z",
    [CLUSTER_CTAID_X] = "cluster_ctaid.x",
    [CLUSTER_CTAID_Y] = "cluster_ctaid.y",
    [CLUSTER_CTAID_Z] = "cluster_ctaid.z",
    [CLUSTER_NCTAID_X] = "cluster_nctaid.x",
    [CLUSTER_NCTAID_Y] = "cluster_nctaid.y",
    [CLUSTER_NCTAID_Z] = "cluster_nctaid.z",
    [CLUSTER_CTARANK] = "cluster_ctarank",
    [CLUSTER_NCTARANK] = "cluster_nctarank",
    [IS_EXPLICIT_CLUSTER] = "is_explicit_cluster",
    [LANEMASK_EQ] = "lanemask_eq",
    [LANEMASK_LE] = "lanemask_le",
    [LANEMASK_LT] = "lanemask_lt",
    [LANEMASK_GE] = "lanemask_ge",
    [LANEMASK_GT] = "lanemask_gt",
    [CLOCK] = "clock",
    [CLOCK_HI] = "clock_hi",
    [CLOCK64] = "clock64",
    [GLOBALTIMER] = "globaltimer",
    [GLOBALTIMER_LO] = "globaltimer_lo",
    [GLOBALTIMER_HI] = "globaltimer_hi",
    [DYNAMIC_SMEM_SIZE] = "dynamic_smem_size",
    [TOTAL_SMEM_SIZE] = "total_smem_size",
    [AGGR_SMEM_SIZE] = "aggr_smem_size",
    [RESERVED_SMEM_BEGIN] = "reserved_smem_offset_begin",
    [RESERVED_SMEM_END] = "reserved_smem_offset_end",
    [RESERVED_SMEM_CAP] = "reserved_smem_offset_cap",
};

int special_index(const char *name, size_t length)
{
    for (int i = 0; i < SPECIALS; i++)
        if (strlen(names[i]) + 1 == length && !memcmp(names[i], name + 1, length - 1)) return i;
    return -1;
}

bool special_is_64bit(int s)
{
    return s == CLOCK64 || s == GLOBALTIMER || s == GRIDID;
}

bool special_is_predicate(int s)
{
    return s == IS_EXPLICIT_CLUSTER;
}

uint64_t special_register(warp *w, int s, int lane)
{
    const cta *c = w->cta;
    const grid *g = c->cluster->grid;
    int t = lane_thread(w, lane);
    switch ((special)s) {
    case TID_X: return (uint64_t)(t % g->ntid[0]);
    case TID_Y: return (uint64_t)(t / g->ntid[0] % g->ntid[1]);
    case TID_Z: return (uint64_t)(t / g->ntid[0] / g->ntid[1]);
    case NTID_X:
    case NTID_Y:
    case NTID_Z: return (uint64_t)g->ntid[s - NTID_X];
    case LANEID: return (uint64_t)lane;
    case WARPID: return (uint64_t)w->index;
    case NWARPID: return (uint64_t)c->warps;
    case CTAID_X:
    case CTAID_Y:
    case CTAID_Z: return (uint64_t)c->ctaid[s - CTAID_X];
    case NCTAID_X:
    case NCTAID_Y:
    case NCTAID_Z: return (uint64_t)g->nctaid[s - NCTAID_X];
    case SMID: return (uint64_t)((c->cluster->id * c->cluster->ctas + c->rank) % SIMULATED_SMS);
    case NSMID: return SIMULATED_SMS;
    case GRIDID: return (uint64_t)g->index + 1;
    case CLUSTERID_X:
    case CLUSTERID_Y:
    case CLUSTERID_Z: return (uint64_t)(c->ctaid[s - CLUSTERID_X] / g->cluster_dim[s - CLUSTERID_X]);
    case NCLUSTERID_X:
    case NCLUSTERID_Y:
    case NCLUSTERID_Z: return (uint64_t)(g->nctaid[s - NCLUSTERID_X] / g->cluster_dim[s - NCLUSTERID_X]);
    case CLUSTER_CTAID_X:
    case CLUSTER_CTAID_Y:
    case CLUSTER_CTAID_Z: return (uint64_t)(c->ctaid[s - CLUSTER_CTAID_X] % g->cluster_dim[s - CLUSTER_CTAID_X]);
    case CLUSTER_NCTAID_X:
    case CLUSTER_NCTAID_Y:
    case CLUSTER_NCTAID_Z: return (uint64_t)g->cluster_dim[s - CLUSTER_NCTAID_X];
    case CLUSTER_CTARANK: return (uint64_t)c->rank;
    case CLUSTER_NCTARANK: return (uint64_t)c->cluster->ctas;
    case IS_EXPLICIT_CLUSTER: return g->explicit_cluster;
    case LANEMASK_EQ: return 1u << lane;
    case LANEMASK_LT: return (1u << lane) - 1;
    case LANEMASK_LE: return (2u << lane) - 1;
    case LANEMASK_GE: return ~((1u << lane) - 1);
    case LANEMASK_GT: return lane == 31 ? 0 : ~((2u << lane) - 1);
    case CLOCK: return (uint32_t)simulated_clock(w);
    case CLOCK_HI: return simulated_clock(w) >> 32;
    case CLOCK64: return simulated_clock(w);
    case GLOBALTIMER: return simulated_clock(w) / 2;
    case GLOBALTIMER_LO: return (uint32_t)(simulated_clock(w) / 2);
    case GLOBALTIMER_HI: return simulated_clock(w) / 2 >> 32;
    case DYNAMIC_SMEM_SIZE: return g->dynamic_shared;
    case TOTAL_SMEM_SIZE: return c->shared_size - SHARED_RESERVED;
    case AGGR_SMEM_SIZE: return c->shared_size;
    case RESERVED_SMEM_BEGIN: return 0;
    case RESERVED_SMEM_END:
    case RESERVED_SMEM_CAP: return SHARED_RESERVED;
    case SPECIALS: break;
    }
    return 0;
}
