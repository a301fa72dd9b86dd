// Findings, counters, the report.
#define _POSIX_C_SOURCE 200809L
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "sched.h"

typedef struct {
    char *sentence, *where, *other;
    const char *kind;
    const inst *in, *other_in; // what makes it the same finding as another
    int ptx_line, warp, lane, cta;
    uint64_t times;
} record;

struct report_buffer {
    record *records;
    int count, room;
    bool fatal;
    uint64_t practice[PRACTICES];
};

enum { MOST_FINDINGS = 64 }; // of one cluster: one mistake can be found at every access

// After one of these a run cannot go on as the program meant it.
static const char *const fatal_kinds[] = {
    "deadlock", "divergence", "livelock", "out-of-bounds", "misaligned", "trap",  "assertion", "barrier",
    "mbarrier", "descriptor", "launch",   "membermask",    "setmaxnreg", "wgmma", "tcgen05",   "tensor-map"};

static bool is_fatal_kind(const char *kind)
{
    for (size_t i = 0; i < sizeof fatal_kinds / sizeof *fatal_kinds; i++)
        if (!strcmp(fatal_kinds[i], kind)) return true;
    return false;
}

struct report_buffer *report_buffer_new(void)
{
    return calloc(1, sizeof(struct report_buffer));
}

static void free_record(record *r)
{
    free(r->sentence);
    free(r->where);
    free(r->other);
}

void report_buffer_free(struct report_buffer *b)
{
    if (!b) return;
    for (int i = 0; i < b->count; i++) free_record(&b->records[i]);
    free(b->records);
    free(b);
}

bool report_is_fatal(const struct report_buffer *b)
{
    return b->fatal;
}

// "fwd.cu:120 (PTX 533), CTA 0, warp 3, lane 5"
static char *describe(const cluster *c, place at)
{
    char text[512] = "";
    size_t n = 0;
#define ADD(...)                                                                              \
    do {                                                                                      \
        int more = snprintf(text + n, sizeof text - n, __VA_ARGS__);                          \
        n = more < 0 || n + (size_t)more >= sizeof text ? sizeof text - 1 : n + (size_t)more; \
    } while (0)
    if (at.in) {
        const module *m = c->grid->kernel->module;
        const char *file = at.in->source_line && at.in->source_file < m->nfiles ? m->files[at.in->source_file] : NULL;
        if (file) {
            const char *slash = strrchr(file, '/');
            ADD("%s:%d (PTX %d)", slash ? slash + 1 : file, at.in->source_line, at.in->line);
        } else {
            ADD("PTX %d", at.in->line);
        }
        ADD(": %s", at.in->text);
    }
    const char *comma = at.in ? ", " : "";
    if (at.w) {
        const cta *a = at.w->cta;
        ADD("%sCTA %d,%d,%d", comma, a->ctaid[0], a->ctaid[1], a->ctaid[2]);
        ADD(", warp %d", at.w->index);
        if (at.lane >= 0) ADD(", lane %d", at.lane);
    }
#undef ADD
    return strdup(text);
}

static void add(cluster *c, place at, const place *other, const char *kind, const char *format, va_list args)
{
    struct report_buffer *b = c->report;
    if (is_fatal_kind(kind)) b->fatal = true;
    for (int i = 0; i < b->count; i++) {
        record *r = &b->records[i];
        if (!strcmp(r->kind, kind) && r->in == at.in && r->other_in == (other ? other->in : NULL)) {
            r->times++;
            return;
        }
    }
    if (b->count == MOST_FINDINGS) {
        b->fatal = true;
        return;
    }
    if (b->count == b->room) {
        int room = b->room ? 2 * b->room : 8;
        record *records = realloc(b->records, (size_t)room * sizeof *records);
        if (!records) {
            b->fatal = true;
            return;
        }
        b->records = records;
        b->room = room;
    }
    va_list again;
    va_copy(again, args);
    int length = vsnprintf(NULL, 0, format, again);
    va_end(again);
    record r = {.kind = kind,
                .in = at.in,
                .times = 1,
                .ptx_line = at.in ? at.in->line : 0,
                .warp = -1,
                .lane = at.lane,
                .cta = -1};
    r.sentence = malloc((size_t)length + 1);
    if (r.sentence) vsnprintf(r.sentence, (size_t)length + 1, format, args);
    if (at.w) {
        const grid *g = c->grid;
        const int *id = at.w->cta->ctaid;
        r.warp = at.w->index;
        r.cta = (id[2] * g->nctaid[1] + id[1]) * g->nctaid[0] + id[0];
    }
    r.where = describe(c, at);
    r.other = other ? describe(c, *other) : strdup("");
    r.other_in = other ? other->in : NULL;
    b->records[b->count++] = r;
}

void finding(cluster *c, place at, const char *kind, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    add(c, at, NULL, kind, format, args);
    va_end(args);
}

void finding_pair(cluster *c, place at, place other, const char *kind, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    add(c, at, &other, kind, format, args);
    va_end(args);
}

static const char *const practice_names[PRACTICES] = {"P1", "P2", "P3", "P4", "P5", "A1"};
static const char *const practice_kinds[PRACTICES] = {"tcgen05-fence", "tcgen05-wait", "scope",
                                                      "mbarrier-init", "proxy",        "mma-order"};
static const char *const practice_sentences[PRACTICES] = {
    "an acquire wait or CTA barrier stood in for tcgen05.fence",
    "the use of a tcgen05.ld's registers stood in for tcgen05.wait::ld",
    ".cta scope between the CTAs of a cluster",
    "an mbarrier signalled asynchronously without fence.mbarrier_init",
    "a TMA write over generic reads without a proxy fence",
    "MMAs of one thread ran in issue order (assumption A1)"};

bool practice_allows(cluster *c, practice p, place at, place other, const char *format, ...)
{
    if (c->grid->practice) {
        c->report->practice[p]++;
        return true;
    }
    va_list args;
    va_start(args, format);
    add(c, at, &other, practice_kinds[p], format, args);
    va_end(args);
    return false;
}

void count_assumption(cluster *c, practice p, place at)
{
    (void)at;
    c->report->practice[p]++;
}

// ------------------------------------------------------------------------------------------------- the report

struct ptxsim_report {
    struct report_buffer all;
    bool finished;
    int warps;
    uint64_t (*executed)[C_COUNT]; // by warp
    char *text;
};

static const char *const class_names[C_COUNT] = {
    [C_INTEGER] = "integer",
    [C_FLOAT] = "float",
    [C_CONVERT] = "convert",
    [C_SPECIAL_FUNCTION] = "special function",
    [C_MOVE] = "move",
    [C_CONTROL] = "control",
    [C_BRANCH] = "branch",
    [C_BARRIER] = "barrier",
    [C_MBARRIER] = "mbarrier",
    [C_FENCE] = "fence",
    [C_LOAD] = "load",
    [C_STORE] = "store",
    [C_ATOMIC] = "atomic",
    [C_WARP] = "warp",
    [C_ASYNC_COPY] = "async copy",
    [C_TMA] = "tma",
    [C_WGMMA] = "wgmma",
    [C_TCGEN05_MMA] = "tcgen05 mma",
    [C_TCGEN05_LD] = "tcgen05 ld",
    [C_TCGEN05_ST] = "tcgen05 st",
    [C_TCGEN05_OTHER] = "tcgen05 other",
    [C_OTHER] = "other",
};

ptxsim_report *report_new(int warps)
{
    ptxsim_report *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->warps = warps;
    r->executed = calloc((size_t)warps, sizeof *r->executed);
    if (r->executed) return r;
    free(r);
    return NULL;
}

static record copy_record(const record *from)
{
    record r = *from;
    r.sentence = from->sentence ? strdup(from->sentence) : NULL;
    r.where = from->where ? strdup(from->where) : NULL;
    r.other = from->other ? strdup(from->other) : NULL;
    return r;
}

void report_add(ptxsim_report *r, const struct report_buffer *b)
{
    for (int p = 0; p < PRACTICES; p++) r->all.practice[p] += b->practice[p];
    for (int i = 0; i < b->count; i++) {
        const record *from = &b->records[i];
        record *same = NULL;
        for (int j = 0; j < r->all.count && !same; j++) {
            record *to = &r->all.records[j];
            if (!strcmp(to->kind, from->kind) && to->in == from->in && to->other_in == from->other_in) same = to;
        }
        if (same) {
            same->times += from->times;
            continue;
        }
        record *records = realloc(r->all.records, (size_t)(r->all.count + 1) * sizeof *records);
        if (!records) return;
        r->all.records = records;
        r->all.records[r->all.count++] = copy_record(from);
    }
}

void report_launch_refused(ptxsim_report *r, const char *format, ...)
{
    record *records = realloc(r->all.records, (size_t)(r->all.count + 1) * sizeof *records);
    if (!records) return;
    r->all.records = records;
    record new = {
        .kind = "launch", .warp = -1, .lane = -1, .cta = -1, .times = 1, .where = strdup(""), .other = strdup("")};
    va_list args;
    va_start(args, format);
    char text[512];
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    new.sentence = strdup(text);
    r->all.records[r->all.count++] = new;
}

void report_add_executed(ptxsim_report *r, const cluster *c)
{
    for (int a = 0; a < c->ctas; a++)
        for (int i = 0; i < c->cta[a].warps && i < r->warps; i++)
            for (int k = 0; k < C_COUNT; k++) r->executed[i][k] += c->cta[a].warp[i].executed[k];
}

void report_finish(ptxsim_report *r, bool finished)
{
    r->finished = finished;
    size_t size;
    FILE *to = open_memstream(&r->text, &size);
    if (!to) return;
    fprintf(to, finished ? "finished" : "not finished");
    fprintf(to, r->all.count == 1 ? ", 1 finding\n" : ", %d findings\n", r->all.count);
    for (int i = 0; i < r->all.count; i++) {
        const record *f = &r->all.records[i];
        fprintf(to, "%s: %s\n    at %s\n", f->kind, f->sentence, f->where);
        if (f->other && *f->other) fprintf(to, "    and %s\n", f->other);
        if (f->times > 1) fprintf(to, "    %llu times\n", (unsigned long long)f->times);
    }
    for (int p = 0; p < PRACTICES; p++)
        if (r->all.practice[p])
            fprintf(to, "%s: %s, %llu times\n", practice_names[p], practice_sentences[p],
                    (unsigned long long)r->all.practice[p]);
    fprintf(to, "executed:");
    for (int k = 0; k < C_COUNT; k++)
        if (ptxsim_executed(r, k)) fprintf(to, " %s %llu", class_names[k], (unsigned long long)ptxsim_executed(r, k));
    fprintf(to, "\n");
    fclose(to);
}

void ptxsim_report_free(ptxsim_report *r)
{
    if (!r) return;
    for (int i = 0; i < r->all.count; i++) free_record(&r->all.records[i]);
    free(r->all.records);
    free(r->executed);
    free(r->text);
    free(r);
}

bool ptxsim_finished(const ptxsim_report *r)
{
    return r->finished;
}

int ptxsim_finding_count(const ptxsim_report *r)
{
    return r->all.count;
}

ptxsim_finding ptxsim_finding_at(const ptxsim_report *r, int index)
{
    const record *f = &r->all.records[index];
    return (ptxsim_finding){.kind = f->kind,
                            .sentence = f->sentence ? f->sentence : "",
                            .where = f->where ? f->where : "",
                            .other = f->other ? f->other : "",
                            .ptx_line = f->ptx_line,
                            .warp = f->warp,
                            .lane = f->lane,
                            .cta = f->cta};
}

uint64_t ptxsim_practice_count(const ptxsim_report *r, const char *name)
{
    for (int p = 0; p < PRACTICES; p++)
        if (!strcmp(practice_names[p], name)) return r->all.practice[p];
    return 0;
}

int ptxsim_class_count(void)
{
    return C_COUNT;
}

const char *ptxsim_class_name(int klass)
{
    return klass >= 0 && klass < C_COUNT ? class_names[klass] : "";
}

uint64_t ptxsim_executed(const ptxsim_report *r, int klass)
{
    uint64_t sum = 0;
    for (int w = 0; w < r->warps; w++) sum += r->executed[w][klass];
    return sum;
}

int ptxsim_report_warps(const ptxsim_report *r)
{
    return r->warps;
}

uint64_t ptxsim_executed_by_warp(const ptxsim_report *r, int warp, int klass)
{
    return r->executed[warp][klass];
}

const char *ptxsim_report_text(const ptxsim_report *r)
{
    return r->text ? r->text : "";
}
