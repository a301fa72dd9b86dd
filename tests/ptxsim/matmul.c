// Tensor products: matrix descriptors, element formats, and the product itself.
#include "matmul.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    CHUNK = 16,
    MAX_ROWS = 256,
    MAX_DEPTH_BYTES = 32,
    MAX_CHUNKS = MAX_ROWS * MAX_DEPTH_BYTES / CHUNK,
    MAX_ELEMENTS = MAX_ROWS * 32
};

// ------------------------------------------------------------------------------------------------- descriptors

static uint32_t bits_of(uint64_t word, int low, int count)
{
    return (uint32_t)(word >> low & ((1u << count) - 1));
}

const char *matrix_descriptor_parse(uint64_t bits, bool tcgen05, matrix_descriptor *d)
{
    if (bits_of(bits, 14, 2)) return "bits 14-15 are set: the start address overflows its 14-bit field";
    if (bits_of(bits, 30, 2)) return "bits 30-31 are set: the leading byte offset overflows its 14-bit field";
    d->start = bits_of(bits, 0, 14) << 4;
    d->lbo = bits_of(bits, 16, 14) << 4;
    d->sbo = bits_of(bits, 32, 14) << 4;
    d->base_offset = bits_of(bits, 49, 3);
    if (!tcgen05) {
        static const int swizzles[4] = {0, 128, 64, 32};
        if (bits_of(bits, 46, 3)) return "bits 46-48 are set, which wgmma reserves (a tcgen05 descriptor?)";
        if (bits_of(bits, 52, 10)) return "reserved bits 52-61 are set";
        d->swizzle = swizzles[bits_of(bits, 62, 2)];
    } else {
        static const int swizzles[8] = {0, SWIZZLE_128_ATOM_32, 128, -1, 64, -1, 32, -1};
        if (bits_of(bits, 46, 3) != 1) return "bits 46-48 are not 0b001, the version of tcgen05 (a wgmma descriptor?)";
        if (bits_of(bits, 52, 1))
            return "bit 52, the absolute leading address, is for K = 96 of sm_103a: not supported";
        if (bits_of(bits, 53, 8)) return "reserved bits 53-60 are set";
        d->swizzle = swizzles[bits_of(bits, 61, 3)];
        if (d->swizzle < 0) return "the swizzle field (bits 61-63) is 3, 5 or 7";
    }
    if (d->swizzle == 0 && d->base_offset) return "a base offset without swizzle";
    return NULL;
}

// Where the chunk (r, depth) begins, from the descriptor's start, before the swizzle. "Canonical layouts"; measured for
// wgmma on an H200 with arbitrary start, LBO and SBO. UNVERIFIED on sm_100, where the manual's text is the same.
static uint32_t chunk_offset(const matrix_layout *l, int mn, int depth)
{
    const matrix_descriptor *d = &l->descriptor;
    uint32_t r = (uint32_t)mn, k = (uint32_t)depth,
             span = d->swizzle == SWIZZLE_128_ATOM_32 ? 128 : (uint32_t)d->swizzle;
    if (!l->mn_major) {
        if (span == 0) return r % 8 * CHUNK + r / 8 * d->sbo + k * d->lbo;
        return r % 8 * span + r / 8 * d->sbo + k * CHUNK;
    }
    if (span == 0) return r * d->sbo + k % 8 * CHUNK + k / 8 * d->lbo;
    uint32_t group = d->swizzle == SWIZZLE_128_ATOM_32 ? 4 : 8, chunks = span / CHUNK;
    return r % chunks * CHUNK + r / chunks * d->lbo + k % group * span + k / group * d->sbo;
}

matrix_layout matrix_rows(const matrix_layout *l, int first, int rows)
{
    matrix_layout part = *l;
    part.descriptor.start += chunk_offset(l, l->mn_major ? first * l->element_bytes / CHUNK : first, 0);
    part.rows = rows;
    return part;
}

// The swizzle XORs bits of the absolute address, so that a start inside an atom works.
static uint32_t swizzled(const matrix_descriptor *d, uint32_t address)
{
    uint32_t row = (address >> 7) - d->base_offset;
    switch (d->swizzle) {
    case 32: return address ^ (row & 1) << 4;
    case 64: return address ^ (row & 3) << 4;
    case 128: return address ^ (row & 7) << 4;
    case SWIZZLE_128_ATOM_32: return address ^ (row & 3) << 5;
    default: return address;
    }
}

// An operand's chunks, by ascending address and joined into runs, are read at once; position says where in what was
// read each chunk is. Both depend only on the layout and the start's low 10 bits, so they are kept.
typedef struct chunk_table {
    struct chunk_table *next;
    matrix_layout layout; // start: low 10 bits
    int chunks, distinct, nruns;
    uint16_t position[MAX_CHUNKS];
    shared_run runs[MAX_CHUNKS]; // offsets from the start without its low 10 bits
} chunk_table;

enum { TABLE_BUCKETS = 256, TABLES_KEPT = 4096 };
static _Atomic(chunk_table *) kept_tables[TABLE_BUCKETS]; // lists that only ever grow, at their heads
static atomic_int kept_count;

static int table_rows(const matrix_layout *l)
{
    return l->mn_major ? l->rows * l->element_bytes / CHUNK : l->rows;
}

static int table_depth(const matrix_layout *l)
{
    return l->mn_major ? l->depth_bytes / l->element_bytes : l->depth_bytes / CHUNK;
}

static int compare_offsets(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void table_fill(chunk_table *t, const matrix_layout *l)
{
    int rows = table_rows(l), depth = table_depth(l);
    uint32_t offset[MAX_CHUNKS], sorted[MAX_CHUNKS];
    t->layout = *l;
    t->chunks = rows * depth;
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < depth; k++)
            offset[r * depth + k] = swizzled(&l->descriptor, l->descriptor.start + chunk_offset(l, r, k));
    memcpy(sorted, offset, (size_t)t->chunks * sizeof *sorted);
    qsort(sorted, (size_t)t->chunks, sizeof *sorted, compare_offsets);
    int distinct = 0;
    for (int i = 0; i < t->chunks; i++)
        if (i == 0 || sorted[i] != sorted[distinct - 1]) sorted[distinct++] = sorted[i];
    t->distinct = distinct;
    t->nruns = 0;
    for (int i = 0; i < distinct; i++) {
        if (i > 0 && sorted[i] == sorted[i - 1] + CHUNK)
            t->runs[t->nruns - 1].size += CHUNK;
        else
            t->runs[t->nruns++] = (shared_run){sorted[i], CHUNK};
    }
    for (int i = 0; i < t->chunks; i++) {
        uint32_t *at = bsearch(&offset[i], sorted, (size_t)distinct, sizeof *sorted, compare_offsets);
        t->position[i] = (uint16_t)(at - sorted);
    }
}

static bool same_layout(const matrix_layout *a, const matrix_layout *b)
{
    return a->descriptor.start == b->descriptor.start && a->descriptor.lbo == b->descriptor.lbo &&
           a->descriptor.sbo == b->descriptor.sbo && a->descriptor.base_offset == b->descriptor.base_offset &&
           a->descriptor.swizzle == b->descriptor.swizzle && a->mn_major == b->mn_major &&
           a->element_bytes == b->element_bytes && a->rows == b->rows && a->depth_bytes == b->depth_bytes;
}

// own: filled and returned when the table is not kept and there are too many to keep it.
static const chunk_table *table_for(const matrix_layout *l, chunk_table *own)
{
    const matrix_descriptor *d = &l->descriptor;
    uint32_t hash = d->start * 31 + d->lbo * 7 + d->sbo * 13 + (uint32_t)d->swizzle + (uint32_t)l->rows * 5 +
                    (uint32_t)l->mn_major + d->base_offset;
    _Atomic(chunk_table *) *bucket = &kept_tables[(hash ^ hash >> 8 ^ hash >> 16) % TABLE_BUCKETS];
    for (chunk_table *t = atomic_load_explicit(bucket, memory_order_acquire); t; t = t->next)
        if (same_layout(&t->layout, l)) return t;
    chunk_table *t = NULL;
    if (atomic_fetch_add(&kept_count, 1) < TABLES_KEPT) t = malloc(sizeof *t);
    if (!t) {
        table_fill(own, l);
        return own;
    }
    table_fill(t, l);
    t->next = atomic_load(bucket);
    while (!atomic_compare_exchange_weak(bucket, &t->next, t)) continue;
    return t;
}

// Reads all chunks of an operand; the table tells where each is.
static const chunk_table *read_chunks(agent *a, cta *c, const matrix_layout *l, unsigned char *data, uint8_t *poison,
                                      chunk_table *own)
{
    matrix_layout low = *l;
    uint32_t high = l->descriptor.start & ~1023u;
    low.descriptor.start &= 1023;
    const chunk_table *t = table_for(&low, own);
    shared_run runs[MAX_CHUNKS];
    for (int i = 0; i < t->nruns; i++) runs[i] = (shared_run){t->runs[i].offset + high, t->runs[i].size};
    return agent_read_shared_runs(a, c, runs, t->nruns, data, poison) ? t : NULL;
}

static bool any_set(const uint8_t *bytes, size_t count)
{
    uint64_t seen = 0, word;
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        memcpy(&word, bytes + i, 8);
        seen |= word;
    }
    for (; i < count; i++) seen |= bytes[i];
    return seen != 0;
}

bool matrix_copy(agent *a, cta *c, const matrix_layout *l, unsigned char *to, uint8_t *poison)
{
    unsigned char data[MAX_CHUNKS * CHUNK];
    uint8_t undefined[MAX_CHUNKS * CHUNK];
    chunk_table own;
    const chunk_table *t = read_chunks(a, c, l, data, undefined, &own);
    if (!t) return false;
    for (int i = 0; i < t->chunks; i++) {
        memcpy(to + i * CHUNK, data + t->position[i] * CHUNK, CHUNK);
        memcpy(poison + i * CHUNK, undefined + t->position[i] * CHUNK, CHUNK);
    }
    return true;
}

// ----------------------------------------------------------------------------------------------------- formats

typedef struct {
    int exponent_bits, mantissa_bits;
    uint32_t largest;  // bits of the largest finite value
    uint32_t infinity; // 0: none
    uint32_t nan;      // 0: none
} format;

static format format_of(type t)
{
    switch (t) {
    case T_F16: return (format){5, 10, 0x7bff, 0x7c00, 0x7fff};
    case T_BF16: return (format){8, 7, 0x7f7f, 0x7f80, 0x7fff};
    case T_E4M3: return (format){4, 3, 0x7e, 0, 0x7f};
    case T_E5M2: return (format){5, 2, 0x7b, 0x7c, 0x7f};
    case T_E2M3X2: return (format){2, 3, 0x1f, 0, 0};
    case T_E3M2X2: return (format){3, 2, 0x1f, 0, 0};
    case T_E2M1X2: return (format){2, 1, 0x07, 0, 0};
    default: return (format){8, 23, 0x7f7fffff, 0x7f800000, 0x7fffffff};
    }
}

int format_bytes(type t)
{
    return t == T_F16 || t == T_BF16 ? 2 : t == T_TF32 || t == T_F32 ? 4 : 1;
}

int format_depth(type t)
{
    return MAX_DEPTH_BYTES / format_bytes(t);
}

static float as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t as_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float half_to_float(uint32_t bits)
{
    float x = as_float((bits & 0x7fff) << 13) * 0x1p112f; // rebias; exact for subnormals too
    uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return as_float(as_bits(x) | special | (bits & 0x8000) << 16);
}

static float small_to_float(format f, uint32_t bits)
{
    int width = f.exponent_bits + f.mantissa_bits;
    uint32_t magnitude = bits & ((1u << width) - 1);
    bool negative = bits >> width & 1;
    if (magnitude > f.largest) {
        if (f.infinity && magnitude == f.infinity) return negative ? -INFINITY : INFINITY;
        return as_float(0x7fffffff);
    }
    int exponent = (int)(magnitude >> f.mantissa_bits);
    uint32_t mantissa = magnitude & ((1u << f.mantissa_bits) - 1);
    int bias = (1 << (f.exponent_bits - 1)) - 1;
    float x = exponent ? ldexpf((float)(mantissa | 1u << f.mantissa_bits), exponent - bias - f.mantissa_bits)
                       : ldexpf((float)mantissa, 1 - bias - f.mantissa_bits);
    return negative ? -x : x;
}

float format_to_float(type t, uint32_t bits)
{
    switch (t) {
    case T_F32: return as_float(bits);
    case T_TF32: return as_float(bits & ~0x1fffu);
    case T_BF16: return as_float(bits << 16);
    case T_F16: return half_to_float(bits);
    default: return small_to_float(format_of(t), bits);
    }
}

uint32_t float_to_format(type t, float x, bool satfinite)
{
    if (t == T_F32) return as_bits(x);
    format f = t == T_TF32 ? (format){8, 10, 0x3fbff, 0x3fc00, 0x3ffff} : format_of(t);
    int shift = t == T_TF32 ? 13 : 0;
    if (x != x) return f.nan << shift;
    uint32_t sign = as_bits(x) >> 31 << (f.exponent_bits + f.mantissa_bits);
    int smallest = 2 - (1 << (f.exponent_bits - 1)), exponent = smallest;
    double magnitude = fabs((double)x);
    uint32_t bits;
    if (isinf(x)) {
        bits = f.largest + 1;
    } else {
        if (magnitude > 0 && ilogb(magnitude) > smallest) exponent = ilogb(magnitude);
        // Units in the last place at this exponent, rounded to nearest even; a carry moves into the exponent by itself.
        double units = rint(ldexp(magnitude, f.mantissa_bits - exponent));
        bits = (uint32_t)units + ((uint32_t)(exponent - smallest) << f.mantissa_bits);
    }
    if (bits > f.largest) bits = satfinite ? f.largest : f.infinity ? f.infinity : f.nan;
    return (bits | sign) << shift;
}

static atomic_bool small_ready;
static float small_table[5][256]; // e4m3, e5m2, e2m3, e3m2, e2m1

static const float *small_values(type t)
{
    static const type types[5] = {T_E4M3, T_E5M2, T_E2M3X2, T_E3M2X2, T_E2M1X2};
    static atomic_flag filling = ATOMIC_FLAG_INIT;
    while (!atomic_load_explicit(&small_ready, memory_order_acquire)) {
        if (atomic_flag_test_and_set(&filling)) continue;
        for (int i = 0; i < 5; i++)
            for (uint32_t bits = 0; bits < 256; bits++)
                small_table[i][bits] = small_to_float(format_of(types[i]), bits);
        atomic_store_explicit(&small_ready, true, memory_order_release);
    }
    for (int i = 0; i < 5; i++)
        if (types[i] == t) return small_table[i];
    return NULL;
}

// 16-byte chunks of shared memory to floats, 16 / element_bytes a chunk. Sub-byte elements are packed from the chunk's
// low end, the rest of its 16 bytes is padding (b4x16_p64, b6x16_p32). UNVERIFIED on silicon.
static void decode_chunks(type t, const unsigned char *data, int chunks, float *to)
{
    int bytes = chunks * CHUNK;
    if (t == T_BF16 || t == T_F16) {
        for (int i = 0; i < bytes / 2; i++) {
            uint16_t element;
            memcpy(&element, data + 2 * i, 2);
            to[i] = t == T_BF16 ? as_float((uint32_t)element << 16) : half_to_float(element);
        }
    } else if (t == T_TF32 || t == T_F32) {
        uint32_t kept = t == T_TF32 ? ~0x1fffu : ~0u;
        for (int i = 0; i < bytes / 4; i++) {
            uint32_t element;
            memcpy(&element, data + 4 * i, 4);
            to[i] = as_float(element & kept);
        }
    } else {
        const float *values = small_values(t);
        int width = t == T_E2M1X2 ? 4 : t == T_E2M3X2 || t == T_E3M2X2 ? 6 : 8;
        for (int i = 0; i < bytes; i++) {
            if (width == 8) {
                to[i] = values[data[i]];
                continue;
            }
            const unsigned char *chunk = data + i / CHUNK * CHUNK;
            int bit = i % CHUNK * width;
            uint32_t pair = chunk[bit / 8] | (bit / 8 + 1 < CHUNK ? (uint32_t)chunk[bit / 8 + 1] << 8 : 0);
            to[i] = values[pair >> bit % 8 & ((1u << width) - 1)];
        }
    }
}

static bool element_poisoned(type t, const uint8_t *chunk, int element, int per_chunk)
{
    int width = t == T_E2M1X2 ? 4 : t == T_E2M3X2 || t == T_E3M2X2 ? 6 : 8 * CHUNK / per_chunk;
    int first = element * width / 8, last = (element * width + width - 1) / 8;
    uint8_t seen = 0;
    for (int i = first; i <= last; i++) seen |= chunk[i];
    return seen;
}

// What was read, as floats in the wanted order.
static void convert_chunks(const chunk_table *table, const matrix_layout *l, type t, const unsigned char *data,
                           const uint8_t *poison, matrix_values *to)
{
    float linear[MAX_ELEMENTS];
    int per_chunk = CHUNK / l->element_bytes, rows = table_rows(l), depth = table_depth(l);
    decode_chunks(t, data, table->distinct, linear);
    if (to->negate)
        for (int i = 0; i < table->distinct * per_chunk; i++) linear[i] = -linear[i];

    // Strides in values of a step inside a chunk, along chunk rows and along chunk depth.
    int row = to->by_depth ? 1 : to->stride, k = to->by_depth ? to->stride : 1;
    int inside = l->mn_major ? row : k, down = l->mn_major ? row * per_chunk : row,
        along = l->mn_major ? k : k * per_chunk;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < depth; j++) {
            const float *from = linear + table->position[r * depth + j] * per_chunk;
            float *out = to->values + r * down + j * along;
            if (inside == 1)
                memcpy(out, from, (size_t)per_chunk * sizeof *out);
            else
                for (int e = 0; e < per_chunk; e++) out[e * inside] = from[e];
        }

    memset(to->row_poison, 0, (size_t)l->rows);
    to->any = any_set(poison, (size_t)table->distinct * CHUNK);
    if (to->any) {
        to->any = false;
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < depth; j++)
                for (int e = 0; e < per_chunk; e++)
                    if (element_poisoned(t, poison + table->position[r * depth + j] * CHUNK, e, per_chunk))
                        to->row_poison[l->mn_major ? r * per_chunk + e : r] = to->any = true;
    }
}

bool matrix_gather(agent *a, cta *c, const matrix_layout *l, type t, matrix_values *to)
{
    unsigned char data[MAX_CHUNKS * CHUNK];
    uint8_t poison[MAX_CHUNKS * CHUNK];
    chunk_table own;
    const chunk_table *table = read_chunks(a, c, l, data, poison, &own);
    if (table) convert_chunks(table, l, t, data, poison, to);
    return table != NULL;
}

enum { KEPT_OPERANDS = 32 };
struct matrix_cache {
    struct {
        matrix_layout layout;
        type t;
        bool negate, any;
        size_t bytes, room; // of data and poison; elements there is room for
        unsigned char *data;
        uint8_t *poison, row_poison[MAX_ROWS];
        float *values;
    } slot[KEPT_OPERANDS];
};

matrix_cache *matrix_cache_new(void)
{
    return calloc(1, sizeof(matrix_cache));
}

void matrix_cache_free(matrix_cache *k)
{
    for (int i = 0; k && i < KEPT_OPERANDS; i++) {
        free(k->slot[i].data);
        free(k->slot[i].poison);
        free(k->slot[i].values);
    }
    free(k);
}

bool matrix_gather_kept(agent *a, cta *c, const matrix_layout *l, type t, matrix_cache *k, matrix_values *to)
{
    unsigned char data[MAX_CHUNKS * CHUNK];
    uint8_t poison[MAX_CHUNKS * CHUNK];
    chunk_table own;
    const chunk_table *table = read_chunks(a, c, l, data, poison, &own);
    if (!table) return false;
    size_t bytes = (size_t)table->distinct * CHUNK, elements = (size_t)(l->rows * l->depth_bytes / l->element_bytes);
    uint32_t start = l->descriptor.start;
    int i = (int)((start >> 5 ^ start >> 10 ^ start >> 15) % KEPT_OPERANDS);
    bool same = same_layout(&k->slot[i].layout, l) && k->slot[i].t == t && k->slot[i].negate == to->negate &&
                k->slot[i].bytes == bytes && !memcmp(k->slot[i].data, data, bytes) &&
                !memcmp(k->slot[i].poison, poison, bytes);
    if (!same && k->slot[i].room < elements) {
        free(k->slot[i].data);
        free(k->slot[i].poison);
        free(k->slot[i].values);
        k->slot[i].data = malloc(4 * elements);
        k->slot[i].poison = malloc(4 * elements);
        k->slot[i].values = malloc(elements * sizeof(float));
        k->slot[i].room = elements;
    }
    to->values = k->slot[i].values;
    to->row_poison = k->slot[i].row_poison;
    if (same) {
        to->any = k->slot[i].any;
        return true;
    }
    convert_chunks(table, l, t, data, poison, to);
    memcpy(k->slot[i].data, data, bytes);
    memcpy(k->slot[i].poison, poison, bytes);
    k->slot[i].layout = *l;
    k->slot[i].t = t;
    k->slot[i].negate = to->negate;
    k->slot[i].any = to->any;
    k->slot[i].bytes = bytes;
    return true;
}

bool format_unpack(type t, const uint32_t *words, const uint8_t *poison, int count, bool negate, float *to)
{
    int bytes = format_bytes(t), per_word = 4 / bytes;
    // In 8-bit containers a 6-bit element has the low bits, a 4-bit element bits 2-5 ("Packing formats used for
    // matrix A"). UNVERIFIED on silicon.
    int shift = t == T_E2M1X2 ? 2 : 0;
    uint32_t kept = bytes == 4                   ? ~0u
                    : bytes == 2                 ? 0xffff
                    : t == T_E2M1X2              ? 0xf
                    : t == T_E4M3 || t == T_E5M2 ? 0xff
                                                 : 0x3f;
    const float *small = bytes == 1 ? small_values(t) : NULL;
    uint8_t seen = 0;
    for (int i = 0; i < count / per_word; i++) seen |= poison[i];
    if (t == T_BF16) {
        uint32_t sign = negate ? 0x80000000 : 0;
        for (int i = 0; i < count / 2; i++) {
            to[2 * i] = as_float(words[i] << 16 ^ sign);
            to[2 * i + 1] = as_float((words[i] & 0xffff0000) ^ sign);
        }
        return seen;
    }
    for (int i = 0; i < count / per_word; i++) {
        for (int j = 0; j < per_word; j++) {
            uint32_t element = words[i] >> (8 * bytes * j + shift) & kept;
            float x = small ? small[element] : format_to_float(t, element);
            to[i * per_word + j] = negate ? -x : x;
        }
    }
    return seen;
}

// ----------------------------------------------------------------------------------------------------- product

typedef float float8 __attribute__((vector_size(32), aligned(4), may_alias));

typedef int32_t int8 __attribute__((vector_size(32), aligned(4), may_alias));

// Every NaN is stored as 0x7fffffff, as tensor cores give it.
#define STORE(to, x)                                                   \
    do {                                                               \
        int8 is_nan = (x) != (x);                                      \
        *(int8 *)(to) = ((int8)(x) & ~is_nan) | (0x7fffffff & is_nan); \
    } while (0)

// Four rows by sixteen columns of d stay in registers while k runs. A macro: the compiler lowers vector types for the
// function's own target before it inlines.
#define MULTIPLY_ADD(name, attributes)                                                                             \
    attributes static void name(int m, int n, int k, const float *a, int a_stride, const float *b, int b_stride,   \
                                float *d, int d_stride)                                                            \
    {                                                                                                              \
        for (int j = 0; j < n; j += 16) {                                                                          \
            bool two = j + 8 < n;                                                                                  \
            for (int i = 0; i < m; i += 4) {                                                                       \
                const float *a0 = a + i * a_stride, *a1 = a0 + a_stride, *a2 = a1 + a_stride, *a3 = a2 + a_stride; \
                float *d0 = d + i * d_stride + j, *d1 = d0 + d_stride, *d2 = d1 + d_stride, *d3 = d2 + d_stride;   \
                float8 x0 = *(float8 *)d0, x1 = *(float8 *)d1, x2 = *(float8 *)d2, x3 = *(float8 *)d3;             \
                if (two) {                                                                                         \
                    float8 y0 = *(float8 *)(d0 + 8), y1 = *(float8 *)(d1 + 8), y2 = *(float8 *)(d2 + 8),           \
                           y3 = *(float8 *)(d3 + 8);                                                               \
                    for (int l = 0; l < k; l++) {                                                                  \
                        const float *row = b + l * b_stride + j;                                                   \
                        float8 u = *(const float8 *)row, v = *(const float8 *)(row + 8);                           \
                        x0 += a0[l] * u, y0 += a0[l] * v;                                                          \
                        x1 += a1[l] * u, y1 += a1[l] * v;                                                          \
                        x2 += a2[l] * u, y2 += a2[l] * v;                                                          \
                        x3 += a3[l] * u, y3 += a3[l] * v;                                                          \
                    }                                                                                              \
                    STORE(d0 + 8, y0);                                                                             \
                    STORE(d1 + 8, y1);                                                                             \
                    STORE(d2 + 8, y2);                                                                             \
                    STORE(d3 + 8, y3);                                                                             \
                } else {                                                                                           \
                    for (int l = 0; l < k; l++) {                                                                  \
                        float8 u = *(const float8 *)(b + l * b_stride + j);                                        \
                        x0 += a0[l] * u, x1 += a1[l] * u, x2 += a2[l] * u, x3 += a3[l] * u;                        \
                    }                                                                                              \
                }                                                                                                  \
                STORE(d0, x0);                                                                                     \
                STORE(d1, x1);                                                                                     \
                STORE(d2, x2);                                                                                     \
                STORE(d3, x3);                                                                                     \
            }                                                                                                      \
        }                                                                                                          \
    }

MULTIPLY_ADD(multiply_add_plain, )
#if defined(__x86_64__)
MULTIPLY_ADD(multiply_add_avx2, __attribute__((target("avx2"))))
#endif

void matrix_multiply_add(int m, int n, int k, const float *a, int a_stride, const float *b, int b_stride, float *d,
                         int d_stride)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        multiply_add_avx2(m, n, k, a, a_stride, b, b_stride, d, d_stride);
        return;
    }
#endif
    multiply_add_plain(m, n, k, a, a_stride, b, b_stride, d, d_stride);
}

void matrix_scale(int m, int n, float *d, int d_stride, float factor)
{
    for (int i = 0; i < m && factor != 1; i++)
        for (int j = 0; j < n; j += 8) *(float8 *)(d + i * d_stride + j) *= factor;
}
