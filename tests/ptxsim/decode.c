// The table of instructions: the rows of all parts, looked up by the longest opcode that ends at a dot.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { SLOTS = 2048 };
static const inst_row *slots[SLOTS];

static unsigned slot_of(const char *s, size_t n)
{
    unsigned h = 2166136261u;
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 16777619u;
    return h % SLOTS;
}

static void fill_slots(void)
{
    static const inst_row *const parts[] = {scalar_rows,  float_rows,  move_rows,   convert_rows,  warp_rows,
                                            control_rows, memory_rows, order_rows,  mbarrier_rows, async_rows,
                                            tma_rows,     wgmma_rows,  tcgen05_rows};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (const inst_row *r = parts[i]; r->opcode; r++) {
            unsigned at = slot_of(r->opcode, strlen(r->opcode));
            while (slots[at]) at = (at + 1) % SLOTS;
            slots[at] = r;
        }
}

static const inst_row *row_of(const char *opcode, size_t n)
{
    for (unsigned at = slot_of(opcode, n); slots[at]; at = (at + 1) % SLOTS)
        if (strlen(slots[at]->opcode) == n && !memcmp(slots[at]->opcode, opcode, n)) return slots[at];
    return NULL;
}

// No modifier but a type stands twice in an instruction. NULL, or the one that does.
static const char *repeated(const inst *in)
{
    for (int i = 0; i < in->mods; i++)
        if (type_from(in->mod[i]) == T_NONE && mod_index(in, in->mod[i]) < i) return in->mod[i];
    return NULL;
}

const char *decode(inst *in, const kernel *k, bool *unknown)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, fill_slots);
    for (size_t n = strlen(in->text); n;) {
        const inst_row *row = row_of(in->text, n);
        if (row) {
            int words = 1; // of the family's name: the others are modifiers
            for (const char *s = row->opcode; *s; s++) words += *s == '.';
            in->opcode = row->opcode;
            in->mod += words - 1;
            in->mods -= words - 1;
            const char *wrong = repeated(in);
            if (!wrong) wrong = row->decode(in, k);
            if (!wrong && !in->exec) wrong = "not implemented";
            return wrong;
        }
        while (--n && in->text[n] != '.');
    }
    *unknown = true;
    return "unknown instruction";
}

int mod_index(const inst *in, const char *name)
{
    for (int i = 0; i < in->mods; i++)
        if (!strcmp(in->mod[i], name)) return i;
    return -1;
}

const char *mods_only(const inst *in, const char *const *allowed)
{
    for (int i = 0; i < in->mods; i++) {
        const char *const *a = allowed;
        while (*a && strcmp(*a, in->mod[i])) a++;
        if (!*a) return in->mod[i];
    }
    return NULL;
}

static const struct {
    const char *name;
    int bytes;
} types[] = {
    [T_NONE] = {"", 0},         [T_PRED] = {"pred", 1},     [T_B8] = {"b8", 1},           [T_B16] = {"b16", 2},
    [T_B32] = {"b32", 4},       [T_B64] = {"b64", 8},       [T_B128] = {"b128", 16},      [T_U8] = {"u8", 1},
    [T_U16] = {"u16", 2},       [T_U32] = {"u32", 4},       [T_U64] = {"u64", 8},         [T_S8] = {"s8", 1},
    [T_S16] = {"s16", 2},       [T_S32] = {"s32", 4},       [T_S64] = {"s64", 8},         [T_F16] = {"f16", 2},
    [T_F16X2] = {"f16x2", 4},   [T_BF16] = {"bf16", 2},     [T_BF16X2] = {"bf16x2", 4},   [T_F32] = {"f32", 4},
    [T_F32X2] = {"f32x2", 8},   [T_F64] = {"f64", 8},       [T_TF32] = {"tf32", 4},       [T_E4M3] = {"e4m3", 1},
    [T_E5M2] = {"e5m2", 1},     [T_E4M3X2] = {"e4m3x2", 2}, [T_E5M2X2] = {"e5m2x2", 2},   [T_E2M3X2] = {"e2m3x2", 2},
    [T_E3M2X2] = {"e3m2x2", 2}, [T_E2M1X2] = {"e2m1x2", 1}, [T_UE8M0X2] = {"ue8m0x2", 2},
};

type type_from(const char *modifier)
{
    for (size_t t = T_PRED; t < sizeof types / sizeof *types; t++)
        if (!strcmp(types[t].name, modifier)) return (type)t;
    return T_NONE;
}

int type_bytes(type t)
{
    return types[t].bytes;
}

bool target_has(const kernel *k, int feature)
{
    const module *m = k->module;
    switch (feature) {
    case FEATURE_SM90: return m->sm >= 90;
    case FEATURE_SM90A: return m->sm == 90 && m->sm_suffix == 'a';
    case FEATURE_SM100: return m->sm >= 100;
    case FEATURE_SM100AF: return m->sm >= 100 && m->sm_suffix;
    case FEATURE_SM103AF: return m->sm >= 103 && m->sm_suffix;
    }
    return false;
}
