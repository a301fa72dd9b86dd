// membar and fence (PTX ISA, "membar / fence"): all forms.
#include <string.h>

#include "order.h"

// p[0]: scope, p[1]: spaces of a proxy fence, p[2]: semantics.
static outcome exec_fence(warp *w, const inst *in, uint32_t mask)
{
    order_fence(w, mask, (scope)in->p[0], in->p[2]);
    return RAN;
}

static outcome exec_proxy_async(warp *w, const inst *in, uint32_t mask)
{
    order_proxy_fence_lanes(w, mask, in->p[1]);
    return RAN;
}

// One thread's accesses have one address each here, and tensor maps are read as they are in memory, so that fences for
// the alias and tensormap proxies order no more than a fence of their scope. What the async proxy did is visible to the
// generic one as soon as it is known to be over, so that a fence in that direction alone orders nothing more.
static outcome exec_proxy_nothing(warp *w, const inst *in, uint32_t mask)
{
    (void)w, (void)in, (void)mask;
    return RAN;
}

static outcome exec_mbarrier_init(warp *w, const inst *in, uint32_t mask)
{
    (void)in;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) order_mbarrier_init(w, __builtin_ctz(lanes));
    return RAN;
}

// fence.release.sync_restrict::shared::cta.cluster: for what was done to mbarriers and shared memory of the own CTA.
static outcome exec_release_restricted(warp *w, const inst *in, uint32_t mask)
{
    exec_mbarrier_init(w, in, mask);
    order_fence(w, mask, SCOPE_CLUSTER, FENCE_RELEASE);
    return RAN;
}

static int scope_of(const char *name)
{
    static const char *const names[] = {"cta", "cluster", "gpu", "sys"};
    for (int i = 0; i < 4; i++)
        if (!strcmp(name, names[i])) return i;
    return -1;
}

static bool is(const inst *in, int i, const char *name)
{
    return i < in->mods && !strcmp(in->mod[i], name);
}

static const char *decode_membar(inst *in, const kernel *k)
{
    (void)k;
    in->klass = C_FENCE;
    if (in->nops) return "operands: none";
    if (in->mods == 1 && (is(in, 0, "cta") || is(in, 0, "gl") || is(in, 0, "sys"))) {
        in->p[0] = is(in, 0, "cta") ? SCOPE_CTA : is(in, 0, "gl") ? SCOPE_GPU : SCOPE_SYS;
        in->p[2] = FENCE_ACQ_REL;
        in->exec = exec_fence;
        return NULL;
    }
    if (in->mods == 2 && is(in, 0, "proxy") && is(in, 1, "alias")) {
        in->exec = exec_proxy_nothing;
        return NULL;
    }
    return "one of .cta, .gl, .sys, .proxy.alias";
}

static const char *decode_proxy(inst *in)
{
    if (is(in, 1, "alias") && in->mods == 2) {
        in->exec = exec_proxy_nothing;
        return in->nops ? "operands: none" : NULL;
    }
    if (is(in, 1, "async") && in->mods <= 3) {
        in->exec = exec_proxy_async;
        if (in->mods == 2)
            in->p[1] = FENCE_SHARED | FENCE_GLOBAL;
        else if (is(in, 2, "global"))
            in->p[1] = FENCE_GLOBAL;
        else if (is(in, 2, "shared::cta") || is(in, 2, "shared::cluster"))
            in->p[1] = FENCE_SHARED;
        else
            return in->mod[2];
        return in->nops ? "operands: none" : NULL;
    }
    if (is(in, 1, "async::generic") && in->mods == 5 && is(in, 4, "cluster")) {
        bool acquire = is(in, 2, "acquire") && is(in, 3, "sync_restrict::shared::cluster");
        bool release = is(in, 2, "release") && is(in, 3, "sync_restrict::shared::cta");
        if (!acquire && !release) return "acquire.sync_restrict::shared::cluster or release.sync_restrict::shared::cta";
        in->exec = acquire ? exec_proxy_nothing : exec_proxy_async;
        in->p[1] = FENCE_SHARED;
        return in->nops ? "operands: none" : NULL;
    }
    if (is(in, 1, "tensormap::generic") && in->mods == 4 && scope_of(in->mod[3]) >= 0) {
        bool acquire = is(in, 2, "acquire");
        if (!acquire && !is(in, 2, "release")) return in->mod[2];
        in->exec = exec_fence;
        in->p[0] = scope_of(in->mod[3]);
        in->p[2] = acquire ? FENCE_ACQUIRE : FENCE_RELEASE;
        bool operands =
            in->nops == 2 && in->ops[0].kind == OP_BRACKET && in->ops[1].kind == OP_IMM && in->ops[1].imm == 128;
        if (acquire ? !operands : in->nops != 0) return "operands: [map], 128 with .acquire, none with .release";
        return NULL;
    }
    return in->mods > 1 ? in->mod[1] : "a proxy is required";
}

// fence{.sc|.acq_rel|.acquire|.release}.scope, fence.{acquire|release}.sync_restrict::..., fence.mbarrier_init...,
// fence.proxy...
static const char *decode_fence(inst *in, const kernel *k)
{
    (void)k;
    in->klass = C_FENCE;
    if (is(in, 0, "proxy")) return decode_proxy(in);
    if (in->nops) return "operands: none";
    if (is(in, 0, "mbarrier_init")) {
        in->exec = exec_mbarrier_init;
        return in->mods == 3 && is(in, 1, "release") && is(in, 2, "cluster") ? NULL : "mbarrier_init.release.cluster";
    }
    bool acquires = is(in, 0, "acquire"), releases = is(in, 0, "release");
    in->p[2] = acquires ? FENCE_ACQUIRE : releases ? FENCE_RELEASE : FENCE_ACQ_REL;
    if (in->mods == 3 && is(in, 2, "cluster") &&
        ((acquires && is(in, 1, "sync_restrict::shared::cluster")) ||
         (releases && is(in, 1, "sync_restrict::shared::cta")))) {
        in->p[0] = SCOPE_CLUSTER;
        in->exec = acquires ? exec_fence : exec_release_restricted;
        return NULL;
    }
    bool semantics = is(in, 0, "sc") || is(in, 0, "acq_rel") || acquires || releases;
    if (in->mods != 1 + semantics) return in->mods ? in->mod[in->mods - 1] : "a scope is required";
    in->p[0] = scope_of(in->mod[semantics]);
    in->exec = exec_fence;
    return in->p[0] < 0 ? in->mod[semantics] : NULL;
}

const inst_row order_rows[] = {{"membar", decode_membar}, {"fence", decode_fence}, {NULL, NULL}};
