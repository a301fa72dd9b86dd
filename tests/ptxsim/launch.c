// Grids and the threads that run them, and the public API around modules and launches.
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sched.h"

// ----------------------------------------------------------------------------------------------------- modules

ptxsim_module *ptxsim_parse(const char *text, char *error, size_t error_size)
{
    return module_parse(text, error, error_size, NULL);
}

void ptxsim_module_free(ptxsim_module *m)
{
    module_free(m);
}

static const kernel *entry(const module *m, int index)
{
    for (int i = 0; i < m->count; i++)
        if (m->kernels[i].is_entry && index-- == 0) return &m->kernels[i];
    return NULL;
}

int ptxsim_kernel_count(const ptxsim_module *m)
{
    int n = 0;
    for (int i = 0; i < m->count; i++) n += m->kernels[i].is_entry;
    return n;
}

const char *ptxsim_kernel_name(const ptxsim_module *m, int index)
{
    return entry(m, index)->name;
}

int ptxsim_param_count(const ptxsim_module *m, int index)
{
    return entry(m, index)->nparams;
}

void ptxsim_param(const ptxsim_module *m, int index, int param, size_t *size, size_t *alignment)
{
    const kernel *k = entry(m, index);
    const variable *v = &k->variables[k->first_param + param];
    *size = v->size;
    *alignment = v->align;
}

size_t ptxsim_static_shared(const ptxsim_module *m, int index)
{
    return entry(m, index)->shared_bytes;
}

int ptxsim_register_count(const ptxsim_module *m, int index)
{
    return entry(m, index)->regs;
}

char *ptxsim_unknown(const char *text)
{
    char *lines = NULL, error[512] = "";
    size_t size;
    FILE *to = open_memstream(&lines, &size);
    if (!to) return NULL;
    module *m = module_parse(text, error, sizeof error, to);
    if (!m) fprintf(to, "%s\n", error);
    module_free(m);
    fclose(to);
    return lines;
}

// ---------------------------------------------------------------------------------------------------- launches

enum { MOST_ACTIVE = 132 }; // CTAs that are under way at once: as many as a chip has SMs
#define SLICE_BUDGET 4000000u
#define DEFAULT_MAX_STEPS 1000000000u

typedef enum { READY, WAITING_FOR_GRID, RUNNING } stage;
typedef struct active {
    struct active *next;
    cluster *c;
    struct grid_run *of;
    stage stage;
    bool was_triggered;
    uint64_t counted; // instructions already added to the grid's
} active;

typedef struct kept {
    struct kept *next;
    int id;
    struct report_buffer *b;
} kept;

typedef struct grid_run {
    grid g;
    int nclusters[3];
    int64_t total, next, done, triggered; // clusters: next to start, ended (or cancelled), ended or triggered
    uint64_t steps;
    int failed_id; // the first cluster that failed, INT32_MAX: none
    kept *kept;    // reports with findings
} grid_run;

struct launch {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    grid_run *grids;
    int count;
    uint64_t max_steps;
    bool dependent, failed;
    active *active; // in the order in which they are tried
    int nactive, running;
    ptxsim_report *report;
};

static void first_ctaid(const grid_run *r, int64_t id, int ctaid[3])
{
    const int *n = r->nclusters, *d = r->g.cluster_dim;
    ctaid[0] = (int)(id % n[0]) * d[0];
    ctaid[1] = (int)(id / n[0] % n[1]) * d[1];
    ctaid[2] = (int)(id / n[0] / n[1]) * d[2];
}

bool launch_cancel_next(grid *g, int ctaid[3])
{
    struct launch *l = g->launch;
    grid_run *r = &l->grids[g->index];
    pthread_mutex_lock(&l->lock);
    bool got = r->next < r->total && !l->failed;
    if (got) {
        first_ctaid(r, r->next++, ctaid);
        r->done++;
        r->triggered++;
    }
    pthread_mutex_unlock(&l->lock);
    return got;
}

static bool grid_done(const grid_run *r)
{
    return r->done == r->total;
}

// Whether clusters of grid i may start: the one before is done, or lets dependents start early.
static bool grid_open(const struct launch *l, int i)
{
    if (i == 0) return true;
    const grid_run *before = &l->grids[i - 1];
    return grid_done(before) || (l->dependent && before->triggered == before->total);
}

bool launch_earlier_grids_done(const grid *g)
{
    if (g->index == 0) return true;
    struct launch *l = g->launch;
    pthread_mutex_lock(&l->lock);
    bool done = true;
    for (int i = 0; i < g->index; i++) done &= grid_done(&l->grids[i]);
    pthread_mutex_unlock(&l->lock);
    return done;
}

static int active_ctas(const struct launch *l)
{
    int n = 0;
    for (const active *a = l->active; a; a = a->next)
        n += a->of->g.cluster_dim[0] * a->of->g.cluster_dim[1] * a->of->g.cluster_dim[2];
    return n;
}

static void append(struct launch *l, active *a)
{
    active **end = &l->active;
    while (*end) end = &(*end)->next;
    a->next = NULL;
    *end = a;
}

static void unlink_active(struct launch *l, active *a)
{
    active **at = &l->active;
    while (*at != a) at = &(*at)->next;
    *at = a->next;
}

// The next cluster to run a slice of: a new one while there is room, else the one that has waited longest. Called with
// the lock held.
static active *choose(struct launch *l)
{
    if (!l->failed)
        for (int i = 0; i < l->count; i++) {
            grid_run *r = &l->grids[i];
            if (r->next == r->total || !grid_open(l, i)) continue;
            int ctas = r->g.cluster_dim[0] * r->g.cluster_dim[1] * r->g.cluster_dim[2];
            if (l->active && active_ctas(l) + ctas > MOST_ACTIVE) break;
            active *a = calloc(1, sizeof *a);
            if (!a) return NULL;
            *a = (active){.of = r, .stage = RUNNING};
            int id[3];
            int64_t number = r->next++;
            first_ctaid(r, number, id);
            append(l, a);
            l->running++;
            pthread_mutex_unlock(&l->lock);
            cluster *c = cluster_new(&r->g, (int)number, id);
            if (c && l->dependent && i + 1 < l->count) {
                // Early: dependents start as soon as they may. Late: this grid ends first. Random: either.
                bool early =
                    r->g.schedule == SCHEDULE_EARLY || (r->g.schedule == SCHEDULE_RANDOM && next_random(c) % 2);
                if (early) cluster_pause_on_trigger(c);
            }
            pthread_mutex_lock(&l->lock);
            a->c = c;
            return a;
        }
    for (active *a = l->active; a; a = a->next) {
        bool ready = a->stage == READY;
        if (a->stage == WAITING_FOR_GRID) {
            ready = true;
            for (int i = 0; i < a->of->g.index; i++) ready &= grid_done(&l->grids[i]);
        }
        if (!ready) continue;
        unlink_active(l, a);
        append(l, a);
        a->stage = RUNNING;
        l->running++;
        return a;
    }
    return NULL;
}

static void end_cluster(struct launch *l, active *a, bool failed)
{
    grid_run *r = a->of;
    unlink_active(l, a);
    r->done++;
    if (!a->was_triggered) r->triggered++;
    if (failed) l->failed = true;
    if (a->c) {
        if (failed && a->c->id < r->failed_id) r->failed_id = a->c->id;
        report_add_executed(l->report, a->c);
        kept *k = malloc(sizeof *k);
        if (k) {
            *k = (kept){r->kept, a->c->id, a->c->report};
            r->kept = k;
            a->c->report = NULL;
        }
    }
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    cluster_free(a->c);
    free(a);
    pthread_mutex_lock(&l->lock);
}

static void *work(void *argument)
{
    struct launch *l = argument;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        active *a = choose(l);
        if (!a) {
            if (!l->running) break; // all done, or nothing that could wake the rest
            pthread_cond_wait(&l->changed, &l->lock);
            continue;
        }
        if (!a->c) {
            l->running--;
            report_launch_refused(l->report, "out of memory for a cluster");
            end_cluster(l, a, true);
            continue;
        }
        pthread_mutex_unlock(&l->lock);
        slice s = cluster_run(a->c, SLICE_BUDGET);
        pthread_mutex_lock(&l->lock);
        l->running--;
        grid_run *r = a->of;
        r->steps += cluster_instructions(a->c) - a->counted;
        a->counted = cluster_instructions(a->c);
        if (!a->was_triggered && cluster_triggered(a->c)) {
            a->was_triggered = true;
            r->triggered++;
        }
        // The grid has run too long, or this cluster has long done nothing but look at memory.
        if (s == SLICE_PAUSED && (r->steps > l->max_steps || cluster_quiet(a->c) > l->max_steps / 100 + 1000000)) {
            report_livelock(a->c, r->steps);
            s = SLICE_FAILED;
        }
        if (s == SLICE_DONE || s == SLICE_FAILED) {
            end_cluster(l, a, s == SLICE_FAILED);
        } else if (l->failed) {
            end_cluster(l, a, false); // it may wait for what will never come
        } else {
            a->stage = s == SLICE_WAITS ? WAITING_FOR_GRID : READY;
        }
        pthread_cond_broadcast(&l->changed);
    }
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

// Findings in the order of clusters, whatever the order in which they ended; up to the first that failed.
static void collect(struct launch *l, grid_run *r)
{
    while (r->kept) {
        kept **first = &r->kept;
        for (kept **k = &r->kept; *k; k = &(*k)->next)
            if ((*k)->id < (*first)->id) first = k;
        kept *k = *first;
        *first = k->next;
        if (k->id <= r->failed_id) report_add(l->report, k->b);
        report_buffer_free(k->b);
        free(k);
    }
}

// What the driver would refuse.
static bool set_up(struct launch *l, grid_run *r, const ptxsim_launch *from, const ptxsim_options *o, int index)
{
    const kernel *k = NULL;
    ptxsim_report *to = l->report;
    for (int i = 0; from->module && i < from->module->count; i++)
        if (from->module->kernels[i].is_entry && !strcmp(from->module->kernels[i].name, from->kernel))
            k = &from->module->kernels[i];
    if (!k) {
        report_launch_refused(to, "the module has no kernel %s", from->kernel);
        return false;
    }
    grid *g = &r->g;
    *g = (grid){.kernel = k,
                .dynamic_shared = from->dynamic_shared,
                .schedule = (schedule)o->schedule,
                .seed = o->seed,
                .practice = o->practice,
                .strict_mma_order = o->strict_mma_order,
                .index = index,
                .dependent = o->dependent && index > 0,
                .launch = l};
    r->failed_id = INT32_MAX;
    r->total = 1;
    bool cluster_given = false;
    for (int d = 0; d < 3; d++) cluster_given |= from->cluster[d] > 1;
    uint64_t threads = 1, ctas = 1;
    for (int d = 0; d < 3; d++) {
        unsigned cluster = from->cluster[d] ? from->cluster[d] : 1;
        if (k->reqnctapercluster[d]) {
            if (cluster_given && cluster != (unsigned)k->reqnctapercluster[d]) {
                report_launch_refused(to, "%s: the cluster differs from the kernel's .reqnctapercluster", k->name);
                return false;
            }
            cluster = (unsigned)k->reqnctapercluster[d];
        }
        if (!from->grid[d] || from->grid[d] > INT32_MAX || (d && from->grid[d] > 65535) || from->grid[d] % cluster) {
            report_launch_refused(to, "%s: grid[%d] = %u is no multiple of the cluster's %u, or out of range", k->name,
                                  d, from->grid[d], cluster);
            return false;
        }
        if (k->reqntid[0] && from->block[d] != (unsigned)k->reqntid[d]) {
            report_launch_refused(to, "%s: block[%d] = %u, but the kernel requires %d (.reqntid)", k->name, d,
                                  from->block[d], k->reqntid[d]);
            return false;
        }
        if (!from->block[d] || from->block[d] > 1024) {
            report_launch_refused(to, "%s: block[%d] = %u is out of range", k->name, d, from->block[d]);
            return false;
        }
        g->nctaid[d] = (int)from->grid[d];
        g->ntid[d] = (int)from->block[d];
        g->cluster_dim[d] = (int)cluster;
        r->nclusters[d] = (int)(from->grid[d] / cluster);
        r->total *= r->nclusters[d];
        threads *= from->block[d];
        ctas *= cluster;
    }
    g->explicit_cluster = cluster_given || k->explicit_cluster || k->reqnctapercluster[0];
    uint64_t most = k->maxntid[0] ? (uint64_t)k->maxntid[0] * (uint64_t)k->maxntid[1] * (uint64_t)k->maxntid[2] : 1024;
    if (threads > most || threads > 1024) {
        report_launch_refused(to, "%s: %llu threads, at most %llu are allowed", k->name, (unsigned long long)threads,
                              (unsigned long long)(most < 1024 ? most : 1024));
        return false;
    }
    if (ctas > 16 || r->total > INT32_MAX) {
        report_launch_refused(to, ctas > 16 ? "%s: a cluster has at most 16 CTAs" : "%s: too many clusters", k->name);
        return false;
    }
    if (k->shared_bytes + from->dynamic_shared > 227 * 1024) {
        report_launch_refused(to,
                              "%s: %zu bytes of static and %zu of dynamic shared memory, at most 232448 are allowed",
                              k->name, k->shared_bytes, from->dynamic_shared);
        return false;
    }
    if (from->params_size < k->param_bytes) {
        report_launch_refused(to, "%s: %zu bytes of parameters, the kernel takes %zu", k->name, from->params_size,
                              k->param_bytes);
        return false;
    }
    g->params = malloc(k->param_bytes ? k->param_bytes : 1);
    if (!g->params) {
        report_launch_refused(to, "%s: out of memory", k->name);
        return false;
    }
    if (k->param_bytes) memcpy(g->params, from->params, k->param_bytes);
    return true;
}

ptxsim_report *ptxsim_run(const ptxsim_launch *grids, int count, const ptxsim_options *options)
{
    static const ptxsim_options defaults;
    const ptxsim_options *o = options ? options : &defaults;
    int warps = 1;
    for (int i = 0; i < count; i++) {
        uint64_t threads = (uint64_t)grids[i].block[0] * grids[i].block[1] * grids[i].block[2];
        int n = threads > 1024 ? 32 : (int)(threads + LANES - 1) / LANES;
        if (n > warps) warps = n;
    }
    ptxsim_report *report = report_new(warps);
    grid_run *runs = calloc((size_t)count + 1, sizeof *runs);
    if (!report || !runs) {
        free(runs);
        ptxsim_report_free(report);
        return NULL;
    }
    struct launch l = {.grids = runs,
                       .count = count,
                       .dependent = o->dependent,
                       .report = report,
                       .max_steps = o->max_steps ? o->max_steps : DEFAULT_MAX_STEPS};
    bool ok = true;
    for (int i = 0; i < count && ok; i++) ok = set_up(&l, &runs[i], &grids[i], o, i);
    if (ok) {
        pthread_mutex_init(&l.lock, NULL);
        pthread_cond_init(&l.changed, NULL);
        int threads = o->threads > 0 ? o->threads : (int)sysconf(_SC_NPROCESSORS_ONLN);
        int64_t clusters = 0;
        for (int i = 0; i < count; i++) clusters += runs[i].total;
        if (threads > clusters) threads = (int)clusters;
        if (threads > 256) threads = 256;
        pthread_t others[256];
        int started = 0;
        for (int i = 1; i < threads; i++) started += !pthread_create(&others[started], NULL, work, &l);
        work(&l);
        for (int i = 0; i < started; i++) pthread_join(others[i], NULL);
        while (l.active) {
            active *a = l.active;
            l.active = a->next;
            cluster_free(a->c);
            free(a);
        }
        for (int i = 0; i < count; i++) collect(&l, &runs[i]);
        pthread_cond_destroy(&l.changed);
        pthread_mutex_destroy(&l.lock);
    }
    report_finish(report, ok && !l.failed);
    for (int i = 0; i < count; i++) free(runs[i].g.params);
    free(runs);
    return report;
}
