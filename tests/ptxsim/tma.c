// Bulk asynchronous copies: tensor maps, cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, cp.async.bulk,
// cp.reduce.async.bulk, their prefetches, st.async, red.async, st.bulk, clusterlaunchcontrol. PTX ISA, "Data Movement
// and Conversion Instructions: Bulk copy", "Tensor copy"; rules of boxes, swizzles and faults measured on an H200.
#include "matmul.h"
#include "order.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 16, MAX_RANK = 5, SHARED_WINDOW_BYTES = 1 << 18 };

static place here(warp *w, const inst *in, int lane)
{
    return (place){w, in, lane};
}

cta *shared_target(cluster *c, uint64_t address, bool generic, uint32_t *offset)
{
    if (generic) {
        if ((address & WINDOW_MASK) != WINDOW_SHARED) return NULL;
        address &= ~WINDOW_MASK;
    }
    return shared_owner(c, address, offset);
}

// -------------------------------------------------------------------------------------------------- tensor maps

typedef struct {
    uint32_t magic, checksum;
    uint8_t type, rank, swizzle, fill_nan;
    uint8_t element_stride[MAX_RANK];
    uint16_t box[MAX_RANK];
    uint64_t address, stride[MAX_RANK - 1];
    uint64_t dim[MAX_RANK];
} tensor_map;
_Static_assert(sizeof(tensor_map) <= 128, "a tensor map has 128 bytes");
enum { MAP_MAGIC = 0x70616d54, MAP_BYTES = 128 };

static uint32_t map_checksum(const tensor_map *m)
{
    tensor_map clean;
    memcpy(&clean, m, sizeof clean);
    clean.checksum = 0;
    const unsigned char *bytes = (const unsigned char *)&clean;
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < sizeof clean; i++) hash = (hash ^ bytes[i]) * 16777619u;
    return hash;
}

static int map_element_bytes(int type)
{
    switch (type) {
    case PTXSIM_U8: return 1;
    case PTXSIM_U16:
    case PTXSIM_F16:
    case PTXSIM_BF16: return 2;
    case PTXSIM_U64:
    case PTXSIM_S64:
    case PTXSIM_F64: return 8;
    default: return 4;
    }
}

static bool map_is_float(int type)
{
    return type == PTXSIM_F16 || type == PTXSIM_BF16 || type == PTXSIM_F32 || type == PTXSIM_F64 ||
           type == PTXSIM_F32_FTZ || type == PTXSIM_TF32 || type == PTXSIM_TF32_FTZ;
}

static uint32_t swizzle_span(int swizzle)
{
    return swizzle == SWIZZLE_128_ATOM_32 ? 128 : (uint32_t)swizzle;
}

// cuTensorMapEncodeTiled's limits, interleave NONE.
const char *ptxsim_tensor_map(unsigned char map[128], ptxsim_map_type type, int rank, uint64_t address,
                              const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
                              const uint32_t *element_strides, int swizzle, bool fill_nan)
{
    if (!map || !dims || !box || !element_strides || (!strides && rank > 1)) return "an argument is NULL";
    if ((int)type < PTXSIM_U8 || type > PTXSIM_TF32_FTZ) return "the data type is none of CUtensorMapDataType";
    if (type == PTXSIM_TF32 || type == PTXSIM_TF32_FTZ)
        return "TFLOAT32 is not supported: how it rounds is not documented; use FLOAT32";
    if (rank < 1 || rank > MAX_RANK) return "the rank must be 1 to 5";
    if (address % 16) return "the global address must be a multiple of 16 bytes";
    if (!address) return "the global address is NULL";
    uint32_t bytes = (uint32_t)map_element_bytes(type);
    for (int i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > (uint64_t)1 << 32) return "each global dimension must be 1 to 2^32";
        if (box[i] < 1 || box[i] > 256) return "each box dimension must be 1 to 256";
        if (element_strides[i] < 1 || element_strides[i] > 8) return "each element stride must be 1 to 8";
    }
    for (int i = 0; i + 1 < rank; i++) {
        if (strides[i] % 16) return "each global stride must be a multiple of 16 bytes";
        if (strides[i] >> 40) return "each global stride must be below 2^40 bytes";
    }
    if (swizzle != 0 && swizzle != 32 && swizzle != 64 && swizzle != 128 && swizzle != SWIZZLE_128_ATOM_32)
        return "the swizzle must be 0, 32, 64 or 128 bytes";
    if (box[0] * bytes % CHUNK) return "the inner box dimension must be a multiple of 16 bytes";
    if (swizzle && box[0] * bytes > swizzle_span(swizzle)) return "the inner box dimension must fit the swizzle span";
    if (fill_nan && !map_is_float(type)) return "filling with NaN needs a floating point type";

    tensor_map m;
    memset(&m, 0, sizeof m);
    m.magic = MAP_MAGIC;
    m.type = (uint8_t)type;
    m.rank = (uint8_t)rank;
    m.swizzle = (uint8_t)swizzle;
    m.fill_nan = fill_nan;
    m.address = address;
    for (int i = 0; i < MAX_RANK; i++) {
        m.dim[i] = i < rank ? dims[i] : 1;
        m.box[i] = (uint16_t)(i < rank ? box[i] : 1);
        m.element_stride[i] = (uint8_t)(i < rank && i > 0 ? element_strides[i] : 1); // [0]: ignored without interleave
        if (i + 1 < rank) m.stride[i] = strides[i];
    }
    m.checksum = map_checksum(&m);
    memset(map, 0, MAP_BYTES);
    memcpy(map, &m, sizeof m);
    return NULL;
}

// Reads the map that [map, {coordinates}] names.
static bool map_read(warp *w, const inst *in, const operand *o, int lane, tensor_map *m)
{
    cluster *c = w->cta->cluster;
    unsigned char bytes[MAP_BYTES];
    uint64_t address;
    if (!read_address(w, in, o, lane, &address)) return false;
    if (address % 64) {
        finding(c, here(w, in, lane), "misaligned", "the tensor map at %llx is not aligned to 64 bytes",
                (unsigned long long)address);
        return false;
    }
    for (int i = 0; i < MAP_BYTES; i += 32) {
        uint32_t poison = 0;
        if (!load_bytes(w, in, lane, SPACE_GENERIC, address + (uint64_t)i, 32, bytes + i, &poison, ACCESS_WEAK,
                        SCOPE_CTA))
            return false;
        if (poison) {
            finding(c, here(w, in, lane), "poison", "the tensor map is undefined");
            return false;
        }
    }
    memcpy(m, bytes, sizeof *m);
    if (m->magic != MAP_MAGIC || m->checksum != map_checksum(m)) {
        finding(c, here(w, in, lane), "tensor-map", "%llx is no tensor map, or one that was changed",
                (unsigned long long)address);
        return false;
    }
    return true;
}

typedef struct {
    tensor_map map;
    int64_t at[MAX_RANK];            // first coordinates
    uint32_t elements[MAX_RANK];     // of the box, by dimension
    uint32_t rows, row_bytes, pitch; // in shared memory
} box;

static uint32_t box_bytes(const box *b)
{
    return b->rows * b->row_bytes;
}

// "Bounding box", "Traversal stride", "Out of boundary access".
static bool box_read(warp *w, const inst *in, const operand *o, int lane, bool writes_global, box *b)
{
    cluster *c = w->cta->cluster;
    if (!map_read(w, in, o, lane, &b->map)) return false;
    const operand *coordinates = &o->items[1];
    int rank = in->p[0];
    if (b->map.rank != rank) {
        finding(c, here(w, in, lane), "tensor-map", "a %d-dimensional copy with a map of rank %d", rank, b->map.rank);
        return false;
    }
    b->rows = 1;
    for (int i = 0; i < MAX_RANK; i++) {
        uint8_t poison = 0;
        b->at[i] = i < rank ? (int32_t)read_operand(w, &coordinates->items[i], lane, T_S32, &poison) : 0;
        if (poison) {
            finding(c, here(w, in, lane), "poison", "coordinate %d of the tensor copy is undefined", i);
            return false;
        }
        b->elements[i] = (b->map.box[i] + b->map.element_stride[i] - 1u) / b->map.element_stride[i];
        if (i > 0) b->rows *= b->elements[i];
        if (writes_global && b->at[i] < 0) {
            finding(c, here(w, in, lane), "tensor-map", "coordinate %d of a tensor store is negative (%lld)", i,
                    (long long)b->at[i]);
            return false;
        }
    }
    int bytes = map_element_bytes(b->map.type);
    b->row_bytes = (uint32_t)(b->map.box[0] * bytes);
    b->pitch = b->map.swizzle ? swizzle_span(b->map.swizzle) : b->row_bytes;
    if (b->at[0] * bytes % CHUNK) {
        finding(c, here(w, in, lane), "tensor-map",
                "the innermost coordinate %lld of %d-byte elements is not a multiple of 16 bytes", (long long)b->at[0],
                bytes);
        return false;
    }
    return true;
}

// Row r of the box: the part of it inside the tensor. bytes 0: none.
typedef struct {
    uint64_t address;
    uint32_t first, bytes; // in the row
} row_part;

static row_part box_row(const box *b, uint32_t r)
{
    const tensor_map *m = &b->map;
    int64_t bytes = map_element_bytes(m->type);
    uint64_t address = m->address;
    for (int i = 1; i < m->rank; i++) {
        int64_t at = b->at[i] + (int64_t)(r % b->elements[i]) * m->element_stride[i];
        r /= b->elements[i];
        if (at < 0 || (uint64_t)at >= m->dim[i]) return (row_part){0, 0, 0};
        address += (uint64_t)at * m->stride[i - 1];
    }
    int64_t first = b->at[0] < 0 ? -b->at[0] : 0, end = (int64_t)m->dim[0] - b->at[0];
    if (end > m->box[0]) end = m->box[0];
    if (end <= first) return (row_part){0, 0, 0};
    return (row_part){address + (uint64_t)((b->at[0] + first) * bytes), (uint32_t)(first * bytes),
                      (uint32_t)((end - first) * bytes)};
}

// The swizzle XORs bits of the absolute shared address.
static uint32_t swizzled(int swizzle, uint32_t address)
{
    switch (swizzle) {
    case 32: return address ^ (address >> 7 & 1) << 4;
    case 64: return address ^ (address >> 7 & 3) << 4;
    case 128: return address ^ (address >> 7 & 7) << 4;
    case SWIZZLE_128_ATOM_32: return address ^ (address >> 7 & 3) << 5;
    default: return address;
    }
}

static void fill_outside(const box *b, unsigned char *row)
{
    if (!b->map.fill_nan) {
        memset(row, 0, b->row_bytes);
        return;
    }
    // Seen on an H200: 0x7ff7 in every 16 bits, of 32-bit elements too.
    for (uint32_t i = 0; i < b->row_bytes; i++) row[i] = i % 2 ? 0x7f : 0xf7;
}

static void flush_subnormals(unsigned char *data, size_t bytes)
{
    for (size_t i = 0; i + 4 <= bytes; i += 4) {
        uint32_t x;
        memcpy(&x, data + i, 4);
        if (!(x & 0x7f800000)) x &= 0x80000000;
        memcpy(data + i, &x, 4);
    }
}

// ------------------------------------------------------------------------------------------- effects of a copy

// Bytes on their way, with a byte of poison each.
typedef struct {
    unsigned char *data;
    uint8_t *poison;
    size_t size;
} buffer;

static buffer buffer_new(size_t size)
{
    return (buffer){malloc(size ? size : 1), calloc(size ? size : 1, 1), size};
}

static void buffer_free(buffer *b)
{
    free(b->data);
    free(b->poison);
}

static bool box_load(agent *a, const box *b, buffer *to)
{
    for (uint32_t r = 0; r < b->rows; r++) {
        row_part part = box_row(b, r);
        unsigned char *row = to->data + (size_t)r * b->row_bytes;
        if (part.bytes < b->row_bytes) fill_outside(b, row);
        if (part.bytes && !agent_read_global(a, part.address, part.bytes, row + part.first,
                                             to->poison + (size_t)r * b->row_bytes + part.first))
            return false;
    }
    if (b->map.type == PTXSIM_F32_FTZ) flush_subnormals(to->data, to->size);
    return true;
}

// A box between shared memory, swizzled, and a dense buffer. Whole rows of chunks stay within their span, so without
// gaps it is one access.
static bool box_shared(agent *a, cta *c, uint32_t offset, const box *b, buffer *dense, bool write)
{
    size_t pitch = b->pitch, total = b->rows * pitch;
    if (b->row_bytes == b->pitch) {
        if (!b->map.swizzle)
            return write ? agent_write_shared(a, c, offset, total, dense->data, dense->poison)
                         : agent_read_shared(a, c, offset, total, dense->data, dense->poison);
        buffer placed = buffer_new(total);
        bool fine = write || agent_read_shared(a, c, offset, total, placed.data, placed.poison);
        for (uint32_t i = 0; i < total; i += CHUNK) {
            uint32_t at = swizzled(b->map.swizzle, offset + i) - offset;
            if (write) {
                memcpy(placed.data + at, dense->data + i, CHUNK);
                memcpy(placed.poison + at, dense->poison + i, CHUNK);
            } else {
                memcpy(dense->data + i, placed.data + at, CHUNK);
                memcpy(dense->poison + i, placed.poison + at, CHUNK);
            }
        }
        if (write) fine = agent_write_shared(a, c, offset, total, placed.data, placed.poison);
        buffer_free(&placed);
        return fine;
    }
    for (uint32_t r = 0; r < b->rows; r++) // a box narrower than the span leaves the rest of its rows alone
        for (uint32_t i = 0; i < b->row_bytes; i += CHUNK) {
            uint32_t at = swizzled(b->map.swizzle, offset + r * b->pitch + i);
            unsigned char *data = dense->data + (size_t)r * b->row_bytes + i;
            uint8_t *poison = dense->poison + (size_t)r * b->row_bytes + i;
            bool fine = write ? agent_write_shared(a, c, at, CHUNK, data, poison)
                              : agent_read_shared(a, c, at, CHUNK, data, poison);
            if (!fine) return false;
        }
    return true;
}

// --------------------------------------------------------------------------------------------------- reductions

#define COMBINE(name, c_type, expression)                                     \
    static void name(void *memory, const void *from, size_t size)             \
    {                                                                         \
        for (size_t i = 0; i + sizeof(c_type) <= size; i += sizeof(c_type)) { \
            c_type x, y;                                                      \
            memcpy(&x, (char *)memory + i, sizeof x);                         \
            memcpy(&y, (const char *)from + i, sizeof y);                     \
            x = expression;                                                   \
            memcpy((char *)memory + i, &x, sizeof x);                         \
        }                                                                     \
    }

static uint16_t add_16(type t, uint16_t x, uint16_t y)
{
    return (uint16_t)float_to_format(t, format_to_float(t, x) + format_to_float(t, y), false);
}

static uint16_t extreme_16(type t, uint16_t x, uint16_t y, bool max)
{
    float fx = format_to_float(t, x), fy = format_to_float(t, y);
    if (fx != fx) return fy != fy ? 0x7fff : y;
    if (fy != fy) return x;
    if (fx == fy) return max ? x & y : x | y; // -0 < +0
    return (fx > fy) == max ? x : y;
}

// Addition of f32 keeps subnormals, as an H200 does; the manual says that it flushes them. Float addition is rounded to
// nearest even.
COMBINE(add_u32, uint32_t, x + y)
COMBINE(add_u64, uint64_t, x + y)
COMBINE(add_f32, float, x + y)
COMBINE(add_f64, double, x + y)
COMBINE(add_f16, uint16_t, add_16(T_F16, x, y))
COMBINE(add_bf16, uint16_t, add_16(T_BF16, x, y))
COMBINE(min_u32, uint32_t, x < y ? x : y)
COMBINE(min_s32, int32_t, x < y ? x : y)
COMBINE(min_u64, uint64_t, x < y ? x : y)
COMBINE(min_s64, int64_t, x < y ? x : y)
COMBINE(min_f16, uint16_t, extreme_16(T_F16, x, y, false))
COMBINE(min_bf16, uint16_t, extreme_16(T_BF16, x, y, false))
COMBINE(max_u32, uint32_t, x > y ? x : y)
COMBINE(max_s32, int32_t, x > y ? x : y)
COMBINE(max_u64, uint64_t, x > y ? x : y)
COMBINE(max_s64, int64_t, x > y ? x : y)
COMBINE(max_f16, uint16_t, extreme_16(T_F16, x, y, true))
COMBINE(max_bf16, uint16_t, extreme_16(T_BF16, x, y, true))
COMBINE(inc_u32, uint32_t, x >= y ? 0 : x + 1)
COMBINE(dec_u32, uint32_t, x == 0 || x > y ? y : x - 1)
COMBINE(and_b32, uint32_t, x &y)
COMBINE(or_b32, uint32_t, x | y)
COMBINE(xor_b32, uint32_t, x ^ y)
COMBINE(and_b64, uint64_t, x &y)
COMBINE(or_b64, uint64_t, x | y)
COMBINE(xor_b64, uint64_t, x ^ y)

typedef enum { IN_GLOBAL = 1, IN_SHARED = 2, IN_TENSOR = 4, IN_RED_ASYNC = 8 } reduction_use;
static const struct {
    const char *op;
    type type;
    combine_fn combine;
    int use;
} reductions[] = {
    {"add", T_U32, add_u32, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"add", T_S32, add_u32, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"add", T_U64, add_u64, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"add", T_F32, add_f32, IN_GLOBAL | IN_TENSOR},
    {"add", T_F64, add_f64, IN_GLOBAL},
    {"add", T_F16, add_f16, IN_GLOBAL | IN_TENSOR},
    {"add", T_BF16, add_bf16, IN_GLOBAL | IN_TENSOR},
    {"min", T_U32, min_u32, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"min", T_S32, min_s32, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"min", T_U64, min_u64, IN_GLOBAL | IN_TENSOR},
    {"min", T_S64, min_s64, IN_GLOBAL | IN_TENSOR},
    {"min", T_F16, min_f16, IN_GLOBAL | IN_TENSOR},
    {"min", T_BF16, min_bf16, IN_GLOBAL | IN_TENSOR},
    {"max", T_U32, max_u32, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"max", T_S32, max_s32, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"max", T_U64, max_u64, IN_GLOBAL | IN_TENSOR},
    {"max", T_S64, max_s64, IN_GLOBAL | IN_TENSOR},
    {"max", T_F16, max_f16, IN_GLOBAL | IN_TENSOR},
    {"max", T_BF16, max_bf16, IN_GLOBAL | IN_TENSOR},
    {"inc", T_U32, inc_u32, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"dec", T_U32, dec_u32, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"and", T_B32, and_b32, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"or", T_B32, or_b32, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"xor", T_B32, xor_b32, IN_GLOBAL | IN_SHARED | IN_TENSOR | IN_RED_ASYNC},
    {"and", T_B64, and_b64, IN_GLOBAL | IN_TENSOR},
    {"or", T_B64, or_b64, IN_GLOBAL | IN_TENSOR},
    {"xor", T_B64, xor_b64, IN_GLOBAL | IN_TENSOR},
};
enum { REDUCTIONS = sizeof reductions / sizeof *reductions };
static const char *const reduction_ops[] = {"add", "min", "max", "inc", "dec", "and", "or", "xor"};

// 1 + index, or 0. The type of bitwise operations on a tensor map's elements is their width.
static int reduction_find(const char *op, type t, int use)
{
    for (int i = 0; i < REDUCTIONS; i++)
        if (!strcmp(reductions[i].op, op) && reductions[i].type == t && reductions[i].use & use) return i + 1;
    return 0;
}

static combine_fn map_reduction(const char *op, int map_type)
{
    static const type types[] = {T_NONE, T_NONE, T_U32, T_S32, T_U64, T_S64, T_F16, T_F32, T_F64, T_BF16};
    if (map_type > PTXSIM_BF16) return NULL;
    type t = types[map_type];
    bool bitwise = !strcmp(op, "and") || !strcmp(op, "or") || !strcmp(op, "xor");
    if (bitwise) t = t == T_U32 || t == T_S32 ? T_B32 : t == T_U64 || t == T_S64 ? T_B64 : T_NONE;
    int found = t ? reduction_find(op, t, IN_TENSOR) : 0;
    return found ? reductions[found - 1].combine : NULL;
}

// ----------------------------------------------------------------------- copies that complete on an mbarrier

// One destination CTA of a load: its data, then its share of the complete_tx. The CTAs of a multicast are independent.
typedef enum { FROM_TENSOR, FROM_GLOBAL, FROM_SHARED, FROM_REGISTERS } source;
typedef struct {
    source source;
    box box;
    uint64_t address; // FROM_GLOBAL
    cta *from;        // FROM_SHARED
    uint32_t from_offset;
    unsigned char value[CHUNK]; // FROM_REGISTERS
    uint8_t value_poison[CHUNK];
    combine_fn combine; // or NULL: a copy
    cta *to, *barrier;
    uint32_t offset, barrier_offset, bytes;
} load;

static void payload_free(operation *op)
{
    free(op->payload);
}

static bool alive(cluster *c, const operation *op, const cta *to)
{
    if (!to->exited) return true;
    finding(c, agent_place(op->agent), "exit", "an asynchronous copy into CTA %d, which has exited", to->rank);
    return false;
}

static bool run_load(cluster *c, operation *op)
{
    load *l = op->payload;
    if (!alive(c, op, l->to) || !alive(c, op, l->barrier)) return false;
    agent_completes_on(op->agent, l->barrier, l->barrier_offset);
    buffer b = buffer_new(l->bytes);
    bool fine = true;
    switch (l->source) {
    case FROM_TENSOR: fine = box_load(op->agent, &l->box, &b); break;
    case FROM_GLOBAL: fine = agent_read_global(op->agent, l->address, l->bytes, b.data, b.poison); break;
    case FROM_SHARED:
        fine =
            alive(c, op, l->from) && agent_read_shared(op->agent, l->from, l->from_offset, l->bytes, b.data, b.poison);
        break;
    case FROM_REGISTERS:
        memcpy(b.data, l->value, l->bytes);
        memcpy(b.poison, l->value_poison, l->bytes);
        break;
    }
    if (fine) {
        if (l->source == FROM_TENSOR)
            fine = box_shared(op->agent, l->to, l->offset, &l->box, &b, true);
        else if (l->combine)
            fine = agent_reduce_shared(op->agent, l->to, l->offset, l->bytes, b.data, b.poison, l->combine);
        else
            fine = agent_write_shared(op->agent, l->to, l->offset, l->bytes, b.data, b.poison);
    }
    buffer_free(&b);
    return fine && mbarrier_complete_tx(c, l->barrier, l->barrier_offset, l->bytes, op->agent);
}

static void submit_load(warp *w, const inst *in, int lane, const load *l, proxy p)
{
    load *payload = malloc(sizeof *payload);
    *payload = *l;
    operation *op = operation_new(w, in, lane, agent_issue(w, in, lane, STREAM_MBARRIER, p), payload);
    op->run = run_load;
    op->destroy = payload_free;
    operation_submit(w->cta->cluster, op);
    operation_release(op);
}

// What the decoder found in the modifiers and operands of a copy.
enum {
    P_RANK,      // tensor forms
    P_GENERIC,   // shared addresses are generic ones (no state space was given)
    P_OWN_CTA,   // .shared::cta destination
    P_MULTICAST, // index of the mask operand, or -1
    P_POLICY,    // index of the cache policy, or -1
    P_GROUP,     // cta_group, or 0
    P_REDUCTION, // 1 + index in reductions; tensor forms: in reduction_ops
    P_BYTEMASK,  // index of the operand of .cp_mask, or -1
    P_TYPE,      // st.async, red.async
    P_VECTOR,
    P_SOURCE // of a bulk copy: source
};

static bool operand_defined(warp *w, const inst *in, int index, int lane, type t, const char *what, uint64_t *value)
{
    uint8_t poison = 0;
    *value = read_operand(w, &in->ops[index], lane, t, &poison);
    if (!poison) return true;
    finding(w->cta->cluster, here(w, in, lane), "poison", "%s is undefined", what);
    return false;
}

static bool policy_defined(warp *w, const inst *in, int lane)
{
    uint64_t policy;
    return in->p[P_POLICY] < 0 || operand_defined(w, in, in->p[P_POLICY], lane, T_B64, "the cache policy", &policy);
}

// A shared memory operand of the cluster.
static cta *shared_operand(warp *w, const inst *in, int index, int lane, bool own, uint32_t align, const char *what,
                           uint32_t *offset)
{
    cluster *c = w->cta->cluster;
    uint64_t address;
    if (!read_address(w, in, &in->ops[index], lane, &address)) return NULL;
    cta *owner = shared_target(c, address, in->p[P_GENERIC], offset);
    if (!owner) {
        finding(c, here(w, in, lane), "out-of-bounds", "%s, %llx, is not shared memory of the cluster", what,
                (unsigned long long)address);
        return NULL;
    }
    if (own && owner != w->cta) {
        finding(c, here(w, in, lane), "out-of-bounds", "%s is in CTA %d: it must be in the CTA's own shared memory",
                what, owner->rank);
        return NULL;
    }
    if (*offset % align) {
        finding(c, here(w, in, lane), "misaligned", "%s, %llx, is not aligned to %u bytes", what,
                (unsigned long long)address, align);
        return NULL;
    }
    return owner;
}

// Destinations of a load: one CTA, or those of the mask, each with the same offsets. The mbarrier is in the destination
// CTA; with cta_group::2 it may be in its peer, for a multicast in the CTA of each pair that has the parity of mbar's.
static bool submit_loads(warp *w, const inst *in, int lane, load *l, cta *to, cta *barrier)
{
    cluster *c = w->cta->cluster;
    place at = here(w, in, lane);
    bool pair = in->p[P_GROUP] == 2;
    if (pair && (c->ctas & 1)) {
        finding(c, at, "mbarrier", "cta_group::2 in a cluster without CTA pairs");
        return false;
    }
    if (in->p[P_MULTICAST] < 0) {
        if (pair ? (to->rank ^ barrier->rank) >> 1 : to != barrier) {
            finding(c, at, "mbarrier", "the mbarrier is in CTA %d, the destination in CTA %d: %s", barrier->rank,
                    to->rank, pair ? "they must be of one pair" : "they must be in the same CTA");
            return false;
        }
        l->to = to;
        l->barrier = barrier;
        submit_load(w, in, lane, l, PROXY_ASYNC);
        return true;
    }
    uint64_t mask;
    if (!operand_defined(w, in, in->p[P_MULTICAST], lane, T_B16, "the mask of CTAs", &mask)) return false;
    mask &= 0xffff;
    if (!mask || mask >> c->ctas) {
        finding(c, at, "out-of-bounds", "a multicast to the CTAs %04x of a cluster of %d", (unsigned)mask, c->ctas);
        return false;
    }
    for (int rank = 0; rank < c->ctas; rank++) {
        if (!(mask >> rank & 1)) continue;
        l->to = &c->cta[rank];
        l->barrier = pair ? &c->cta[(rank & ~1) | (barrier->rank & 1)] : l->to;
        submit_load(w, in, lane, l, PROXY_ASYNC);
    }
    return true;
}

static bool tensor_load(warp *w, const inst *in, int lane)
{
    load l = {.source = FROM_TENSOR};
    if (!box_read(w, in, &in->ops[1], lane, false, &l.box) || !policy_defined(w, in, lane)) return false;
    cta *to = shared_operand(w, in, 0, lane, in->p[P_OWN_CTA], 128, "the destination", &l.offset);
    cta *barrier = to ? shared_operand(w, in, 2, lane, false, 8, "the mbarrier", &l.barrier_offset) : NULL;
    if (!barrier) return false;
    l.bytes = box_bytes(&l.box);
    return submit_loads(w, in, lane, &l, to, barrier);
}

#define EACH_LANE(name, one)                                          \
    static outcome name(warp *w, const inst *in, uint32_t mask)       \
    {                                                                 \
        for (int lane = 0; lane < LANES; lane++)                      \
            if (mask >> lane & 1 && !one(w, in, lane)) return FAILED; \
        return RAN;                                                   \
    }
EACH_LANE(exec_tensor_load, tensor_load)

static bool tensor_prefetch(warp *w, const inst *in, int lane)
{
    box b;
    return box_read(w, in, &in->ops[0], lane, false, &b) && policy_defined(w, in, lane);
}
EACH_LANE(exec_tensor_prefetch, tensor_prefetch)

// A size operand of a bulk copy: a multiple of 16 bytes.
static bool size_operand(warp *w, const inst *in, int index, int lane, uint32_t *bytes)
{
    uint64_t size;
    if (!operand_defined(w, in, index, lane, T_U32, "the size", &size)) return false;
    *bytes = (uint32_t)size;
    if (*bytes % CHUNK) {
        finding(w->cta->cluster, here(w, in, lane), "misaligned", "a bulk copy of %u bytes: not a multiple of 16",
                *bytes);
        return false;
    }
    if (*bytes > SHARED_WINDOW_BYTES) {
        finding(w->cta->cluster, here(w, in, lane), "out-of-bounds", "a bulk copy of %u bytes", *bytes);
        return false;
    }
    return true;
}

static bool global_operand(warp *w, const inst *in, int index, int lane, uint64_t *address)
{
    if (!read_address(w, in, &in->ops[index], lane, address)) return false;
    if (*address % CHUNK == 0) return true;
    finding(w->cta->cluster, here(w, in, lane), "misaligned", "the global address %llx is not aligned to 16 bytes",
            (unsigned long long)*address);
    return false;
}

// cp.async.bulk and cp.reduce.async.bulk to shared memory.
static bool bulk_load(warp *w, const inst *in, int lane)
{
    load l = {.source = (source)in->p[P_SOURCE]};
    if (!size_operand(w, in, 2, lane, &l.bytes) || !policy_defined(w, in, lane)) return false;
    cta *to = shared_operand(w, in, 0, lane, in->p[P_OWN_CTA], CHUNK, "the destination", &l.offset);
    if (!to) return false;
    if (l.source == FROM_GLOBAL) {
        if (!global_operand(w, in, 1, lane, &l.address)) return false;
    } else {
        l.from = shared_operand(w, in, 1, lane, true, CHUNK, "the source", &l.from_offset);
        if (!l.from) return false;
    }
    cta *barrier = shared_operand(w, in, 3, lane, false, 8, "the mbarrier", &l.barrier_offset);
    if (!barrier) return false;
    if (in->p[P_REDUCTION]) l.combine = reductions[in->p[P_REDUCTION] - 1].combine;
    return submit_loads(w, in, lane, &l, to, barrier);
}
EACH_LANE(exec_bulk_load, bulk_load)

static bool bulk_prefetch(warp *w, const inst *in, int lane)
{
    uint64_t address;
    uint32_t bytes;
    return global_operand(w, in, 0, lane, &address) && size_operand(w, in, 1, lane, &bytes) &&
           policy_defined(w, in, lane);
}
EACH_LANE(exec_bulk_prefetch, bulk_prefetch)

// st.async and red.async: each thread's own value, to shared memory of the cluster, in the generic proxy.
static bool store_async(warp *w, const inst *in, int lane)
{
    load l = {.source = FROM_REGISTERS};
    type t = (type)in->p[P_TYPE];
    int count = in->p[P_VECTOR], bytes = type_bytes(t);
    const operand *v = &in->ops[1];
    l.bytes = (uint32_t)(count * bytes);
    for (int i = 0; i < count; i++) {
        uint8_t poison = 0;
        uint64_t value = read_operand(w, v->kind == OP_VECTOR ? &v->items[i] : v, lane, t, &poison);
        memcpy(l.value + i * bytes, &value, (size_t)bytes); // little-endian hosts only
        for (int j = 0; j < bytes; j++) l.value_poison[i * bytes + j] = poison >> j & 1;
    }
    l.to = shared_operand(w, in, 0, lane, false, l.bytes, "the destination", &l.offset);
    l.barrier = l.to ? shared_operand(w, in, 2, lane, false, 8, "the mbarrier", &l.barrier_offset) : NULL;
    if (!l.barrier) return false;
    if (l.to != l.barrier) {
        finding(w->cta->cluster, here(w, in, lane), "mbarrier", "the mbarrier is in CTA %d, the destination in CTA %d",
                l.barrier->rank, l.to->rank);
        return false;
    }
    if (in->p[P_REDUCTION]) l.combine = reductions[in->p[P_REDUCTION] - 1].combine;
    submit_load(w, in, lane, &l, PROXY_GENERIC);
    return true;
}
EACH_LANE(exec_store_async, store_async)

// --------------------------------------------------------------------------------- copies that join a bulk group

// Reads its source at one moment, writes at a later one: two operations that share this.
typedef struct {
    int references;
    bool tensor;
    box box;
    uint64_t address; // not tensor
    uint32_t offset, bytes;
    uint32_t bytemask; // of each 16 bytes, what is written
    combine_fn combine;
    buffer data;
} store;

static void store_release(operation *op)
{
    store *s = op->payload;
    if (--s->references) return;
    buffer_free(&s->data);
    free(s);
}

static bool run_store_read(cluster *c, operation *op)
{
    (void)c;
    store *s = op->payload;
    if (s->tensor) return box_shared(op->agent, op->w->cta, s->offset, &s->box, &s->data, false);
    return agent_read_shared(op->agent, op->w->cta, s->offset, s->bytes, s->data.data, s->data.poison);
}

static bool store_part(agent *a, const store *s, uint64_t address, size_t from, size_t bytes)
{
    if (s->combine)
        return agent_reduce_global(a, address, bytes, s->data.data + from, s->data.poison + from, s->combine);
    return agent_write_global(a, address, bytes, s->data.data + from, s->data.poison + from);
}

static bool run_store_write(cluster *c, operation *op)
{
    (void)c;
    const store *s = op->payload;
    if (s->tensor) {
        for (uint32_t r = 0; r < s->box.rows; r++) {
            row_part part = box_row(&s->box, r);
            if (part.bytes &&
                !store_part(op->agent, s, part.address, (size_t)r * s->box.row_bytes + part.first, part.bytes))
                return false;
        }
        return true;
    }
    if (s->bytemask == 0xffff) return store_part(op->agent, s, s->address, 0, s->bytes);
    for (uint32_t i = 0; i < s->bytes; i++)
        if (s->bytemask >> i % CHUNK & 1 && !store_part(op->agent, s, s->address + i, i, 1)) return false;
    return true;
}

static void submit_store(warp *w, const inst *in, int lane, const store *from)
{
    cluster *c = w->cta->cluster;
    store *s = malloc(sizeof *s);
    *s = *from;
    s->references = 2;
    s->data = buffer_new(s->bytes);
    operation *read = operation_new(w, in, lane, agent_issue(w, in, lane, STREAM_BULK_READ, PROXY_ASYNC), s);
    operation *write = operation_new(w, in, lane, agent_issue(w, in, lane, STREAM_BULK_WRITE, PROXY_ASYNC), s);
    read->run = run_store_read;
    write->run = run_store_write;
    read->destroy = write->destroy = store_release;
    operation_after(write, read);
    operation_submit(c, read);
    operation_submit(c, write);
    bulk_group_join(w, lane, read, write);
    operation_release(read);
    operation_release(write);
}

static bool tensor_store(warp *w, const inst *in, int lane)
{
    store s = {.tensor = true};
    if (!box_read(w, in, &in->ops[0], lane, true, &s.box) || !policy_defined(w, in, lane)) return false;
    if (in->p[P_REDUCTION]) {
        const char *op = reduction_ops[in->p[P_REDUCTION] - 1];
        s.combine = map_reduction(op, s.box.map.type);
        if (!s.combine) {
            finding(w->cta->cluster, here(w, in, lane), "tensor-map", "no reduction .%s for the map's element type",
                    op);
            return false;
        }
    }
    if (!shared_operand(w, in, 1, lane, true, 128, "the source", &s.offset)) return false;
    s.bytes = box_bytes(&s.box);
    submit_store(w, in, lane, &s);
    return true;
}
EACH_LANE(exec_tensor_store, tensor_store)

static bool bulk_store(warp *w, const inst *in, int lane)
{
    store s = {.bytemask = 0xffff};
    if (!global_operand(w, in, 0, lane, &s.address) || !size_operand(w, in, 2, lane, &s.bytes) ||
        !policy_defined(w, in, lane) || !shared_operand(w, in, 1, lane, true, CHUNK, "the source", &s.offset))
        return false;
    if (in->p[P_BYTEMASK] >= 0) {
        uint64_t mask;
        if (!operand_defined(w, in, in->p[P_BYTEMASK], lane, T_B16, "the byte mask", &mask)) return false;
        s.bytemask = mask & 0xffff;
    }
    if (in->p[P_REDUCTION]) s.combine = reductions[in->p[P_REDUCTION] - 1].combine;
    submit_store(w, in, lane, &s);
    return true;
}
EACH_LANE(exec_bulk_store, bulk_store)

// st.bulk: zeros, by the thread itself.
static bool store_zeros(warp *w, const inst *in, int lane)
{
    static const unsigned char zeros[32];
    cluster *c = w->cta->cluster;
    uint64_t address, size;
    if (!read_address(w, in, &in->ops[0], lane, &address) || !operand_defined(w, in, 1, lane, T_U64, "the size", &size))
        return false;
    if (address % 8 || size % 8) {
        finding(c, here(w, in, lane), "misaligned", "st.bulk of %llu bytes at %llx: both must be multiples of 8",
                (unsigned long long)size, (unsigned long long)address);
        return false;
    }
    if (size > SHARED_WINDOW_BYTES) {
        finding(c, here(w, in, lane), "out-of-bounds", "st.bulk of %llu bytes", (unsigned long long)size);
        return false;
    }
    space s = in->p[P_GENERIC] ? SPACE_GENERIC : SPACE_SHARED;
    while (size) {
        int step = address % 32 == 0 && size >= 32 ? 32 : 8;
        if (!store_bytes(w, in, lane, s, address, step, zeros, 0, ACCESS_WEAK, SCOPE_CTA)) return false;
        address += (uint64_t)step;
        size -= (uint64_t)step;
    }
    return true;
}
EACH_LANE(exec_store_zeros, store_zeros)

// --------------------------------------------------------------------------------------- clusterlaunchcontrol

// The response is opaque to programs; here: first CTA id, and a word that says what happened.
enum { CANCEL_YES = 0x434c4301, CANCEL_NO = 0x434c4300 };

static bool try_cancel(warp *w, const inst *in, int lane)
{
    cluster *c = w->cta->cluster;
    load l = {.source = FROM_REGISTERS, .bytes = CHUNK};
    cta *to = shared_operand(w, in, 0, lane, true, CHUNK, "the response", &l.offset);
    cta *barrier = to ? shared_operand(w, in, 1, lane, true, 8, "the mbarrier", &l.barrier_offset) : NULL;
    if (!barrier) return false;
    if (c->cancel_failed) {
        finding(c, here(w, in, lane), "undefined", "try_cancel after one that was seen to fail: undefined");
        return false;
    }
    int first[3] = {0, 0, 0};
    bool canceled = launch_cancel_next(c->grid, first);
    uint32_t words[4] = {(uint32_t)first[0], (uint32_t)first[1], (uint32_t)first[2], canceled ? CANCEL_YES : CANCEL_NO};
    memcpy(l.value, words, sizeof words);
    memset(l.value_poison, !canceled, 12);
    for (int rank = 0; rank < c->ctas; rank++) {
        l.to = l.barrier = &c->cta[rank];
        if (in->p[P_MULTICAST] || l.to == w->cta) submit_load(w, in, lane, &l, PROXY_ASYNC);
    }
    return true;
}
EACH_LANE(exec_try_cancel, try_cancel)

enum { QUERY_CANCELED, QUERY_CTAID, QUERY_X, QUERY_Y, QUERY_Z };

static bool query_cancel(warp *w, const inst *in, int lane)
{
    cluster *c = w->cta->cluster;
    const operand *response = &in->ops[1];
    size_t low = (size_t)response->reg * LANES + (size_t)lane, high = low + LANES;
    uint32_t words[4] = {(uint32_t)w->regs[low], (uint32_t)(w->regs[low] >> 32), (uint32_t)w->regs[high],
                         (uint32_t)(w->regs[high] >> 32)};
    if (w->poison[high] >> 4) {
        finding(c, here(w, in, lane), "poison", "the response of try_cancel is undefined");
        return false;
    }
    if (words[3] != CANCEL_YES && words[3] != CANCEL_NO) {
        finding(c, here(w, in, lane), "undefined", "query_cancel of something that is no response of try_cancel");
        return false;
    }
    bool canceled = words[3] == CANCEL_YES;
    uint8_t undefined = canceled ? 0 : 0xf;
    if (in->p[0] == QUERY_CANCELED) {
        if (!canceled) c->cancel_failed = true;
        if (in->ops[0].kind == OP_REG) write_register(w, in->ops[0].reg, lane, canceled, T_PRED, 0);
    } else if (in->p[0] == QUERY_CTAID) {
        for (int i = 0; i < 4; i++)
            if (in->ops[0].items[i].kind == OP_REG)
                write_register(w, in->ops[0].items[i].reg, lane, i < 3 ? words[i] : 0, T_B32, i < 3 ? undefined : 0xf);
    } else {
        write_register(w, in->ops[0].reg, lane, words[in->p[0] - QUERY_X], T_B32, undefined);
    }
    return true;
}
EACH_LANE(exec_query_cancel, query_cancel)

// ----------------------------------------------------------------------------------------------------- decoding

static bool is_address(const inst *in, int index)
{
    return index < in->nops && (in->ops[index].kind == OP_BRACKET || in->ops[index].kind == OP_ADDRESS);
}

static bool is_value(const inst *in, int index)
{
    return index < in->nops && (in->ops[index].kind == OP_REG || in->ops[index].kind == OP_IMM);
}

// The words of a copy's modifiers, in whatever order.
typedef struct {
    const char *spaces[2]; // destination, source
    int nspaces;
    bool mbarrier, bulk_group, multicast, policy, bytemask;
    int group;
    const char *op; // of a reduction
    type type;
    bool noftz, l2;
} words;

static const char *read_words(const inst *in, int from, words *f)
{
    memset(f, 0, sizeof *f);
    for (int i = from; i < in->mods; i++) {
        const char *m = in->mod[i];
        bool op = false;
        for (size_t j = 0; j < sizeof reduction_ops / sizeof *reduction_ops; j++) op |= !strcmp(reduction_ops[j], m);
        if (!strcmp(m, "shared::cluster") || !strcmp(m, "shared::cta") || !strcmp(m, "global")) {
            if (f->nspaces == 2) return m;
            f->spaces[f->nspaces++] = m;
        } else if (!strcmp(m, "mbarrier::complete_tx::bytes")) {
            f->mbarrier = true;
        } else if (!strcmp(m, "bulk_group")) {
            f->bulk_group = true;
        } else if (!strcmp(m, "multicast::cluster")) {
            f->multicast = true;
        } else if (!strcmp(m, "L2::cache_hint")) {
            f->policy = true;
        } else if (!strcmp(m, "cp_mask")) {
            f->bytemask = true;
        } else if (!strcmp(m, "cta_group::1") || !strcmp(m, "cta_group::2")) {
            f->group = m[11] - '0';
        } else if (!strcmp(m, "noftz")) {
            f->noftz = true;
        } else if (!strcmp(m, "L2")) {
            f->l2 = true;
        } else if (op) {
            if (f->op) return m;
            f->op = m;
        } else if (type_from(m) && !f->type) {
            f->type = type_from(m);
        } else {
            return m;
        }
    }
    return NULL;
}

static const char *refused_mode(const inst *in)
{
    for (int i = 0; i < in->mods; i++) {
        if (!strncmp(in->mod[i], "im2col", 6)) return "im2col mode is not supported";
        if (!strcmp(in->mod[i], "tile::gather4")) return "tile::gather4 is not supported";
        if (!strcmp(in->mod[i], "tile::scatter4")) return "tile::scatter4 is not supported";
    }
    return NULL;
}

// .{1..5}d first, .tile anywhere; the rest are words. The [map, {coordinates}] operand.
static const char *read_tensor_words(inst *in, int map_operand, words *f)
{
    const char *wrong = refused_mode(in);
    if (wrong) return wrong;
    if (!in->mods || strlen(in->mod[0]) != 2 || in->mod[0][0] < '1' || in->mod[0][0] > '5' || in->mod[0][1] != 'd')
        return "the dimension .1d to .5d is missing";
    int rank = in->mod[0][0] - '0';
    const char *mods[16];
    int count = 0;
    for (int i = 1; i < in->mods && count < 16; i++)
        if (strcmp(in->mod[i], "tile")) mods[count++] = in->mod[i];
    inst rest = *in;
    rest.mod = mods;
    rest.mods = count;
    wrong = read_words(&rest, 0, f);
    if (wrong) return wrong;
    if (map_operand >= in->nops || in->ops[map_operand].kind != OP_BRACKET || in->ops[map_operand].count != 2 ||
        in->ops[map_operand].items[1].kind != OP_VECTOR)
        return "the operand [map, {coordinates}] is missing";
    if (in->ops[map_operand].items[1].count != rank) return "the number of coordinates does not fit the dimension";
    in->p[P_RANK] = rank;
    in->klass = C_TMA;
    return NULL;
}

// Optional operands at the end: a mask, then a cache policy.
static const char *read_tail(inst *in, int next, const words *f)
{
    in->p[P_MULTICAST] = in->p[P_POLICY] = in->p[P_BYTEMASK] = -1;
    if (f->multicast) {
        if (!is_value(in, next)) return "the mask of CTAs is missing";
        in->p[P_MULTICAST] = next++;
    }
    if (f->policy) {
        if (!is_value(in, next)) return "the cache policy is missing";
        in->p[P_POLICY] = next++;
    }
    if (f->bytemask) {
        if (!is_value(in, next)) return "the byte mask is missing";
        in->p[P_BYTEMASK] = next++;
    }
    return next == in->nops ? NULL : "the operands do not fit the modifiers";
}

static bool spaces_are(const words *f, const char *to, const char *from)
{
    return f->nspaces == 2 && !strcmp(f->spaces[0], to) && !strcmp(f->spaces[1], from);
}

static const char *const needs_sm90 = "it needs a target of sm_90 or later";

static const char *decode_tensor(inst *in, const kernel *k)
{
    words f;
    if (!target_has(k, FEATURE_SM90)) return needs_sm90;
    bool load = in->nops > 1 && in->ops[1].kind == OP_BRACKET && in->ops[1].count == 2;
    const char *wrong = read_tensor_words(in, load ? 1 : 0, &f);
    if (wrong) return wrong;
    if (f.op || f.type || f.noftz || f.l2 || f.bytemask) return "a modifier that tensor copies do not have";
    if (load) {
        if (!spaces_are(&f, "shared::cluster", "global") && !spaces_are(&f, "shared::cta", "global"))
            return "the state spaces must be .shared::cluster.global or .shared::cta.global";
        if (!f.mbarrier || f.bulk_group) return "loads complete by .mbarrier::complete_tx::bytes";
        if (f.group && !target_has(k, FEATURE_SM100AF)) return ".cta_group needs a target of the sm_100 family";
        in->p[P_OWN_CTA] = !strcmp(f.spaces[0], "shared::cta");
        if (in->p[P_OWN_CTA] && (f.multicast || f.group)) return ".shared::cta has no multicast and no .cta_group";
        if (!is_address(in, 0) || !is_address(in, 2))
            return "operands: [destination], [map, {coordinates}], [mbarrier]";
        in->p[P_GROUP] = f.group;
        in->exec = exec_tensor_load;
        return read_tail(in, 3, &f);
    }
    if (!spaces_are(&f, "global", "shared::cta")) return "the state spaces must be .global.shared::cta";
    if (!f.bulk_group || f.mbarrier || f.multicast || f.group) return "stores complete by .bulk_group";
    if (!is_address(in, 1)) return "operands: [map, {coordinates}], [source]";
    in->exec = exec_tensor_store;
    return read_tail(in, 2, &f);
}

static const char *decode_reduce_tensor(inst *in, const kernel *k)
{
    words f;
    if (!target_has(k, FEATURE_SM90)) return needs_sm90;
    const char *wrong = read_tensor_words(in, 0, &f);
    if (wrong) return wrong;
    if (f.type || f.noftz || f.l2 || f.bytemask || f.mbarrier || f.multicast || f.group)
        return "a modifier that tensor reductions do not have";
    if (!spaces_are(&f, "global", "shared::cta") || !f.bulk_group || !f.op)
        return "it must be .global.shared::cta, an operation, .bulk_group";
    for (int i = 0; i < (int)(sizeof reduction_ops / sizeof *reduction_ops); i++)
        if (!strcmp(reduction_ops[i], f.op)) in->p[P_REDUCTION] = i + 1;
    if (!is_address(in, 1)) return "operands: [map, {coordinates}], [source]";
    in->exec = exec_tensor_store;
    return read_tail(in, 2, &f);
}

static const char *decode_prefetch_tensor(inst *in, const kernel *k)
{
    words f;
    if (!target_has(k, FEATURE_SM90)) return needs_sm90;
    const char *wrong = read_tensor_words(in, 0, &f);
    if (wrong) return wrong;
    if (!f.l2 || f.nspaces != 1 || strcmp(f.spaces[0], "global") || f.op || f.type || f.noftz || f.bytemask ||
        f.mbarrier || f.bulk_group || f.multicast || f.group)
        return "it must be .L2.global";
    in->exec = exec_tensor_prefetch;
    return read_tail(in, 1, &f);
}

static const char *decode_bulk(inst *in, const kernel *k)
{
    words f;
    if (!target_has(k, FEATURE_SM90)) return needs_sm90;
    const char *wrong = read_words(in, 0, &f);
    if (wrong) return wrong;
    bool reduces = !strncmp(in->opcode, "cp.reduce", 9);
    in->klass = C_TMA;
    if (f.group || f.l2) return "a modifier that bulk copies do not have";
    if (reduces != (f.op != NULL) || reduces != (f.type != T_NONE)) return "an operation and a type are for reductions";
    if (f.nspaces != 2) return "the two state spaces are missing";
    if (!strcmp(f.spaces[0], "global")) {
        if (strcmp(f.spaces[1], "shared::cta")) return "the source must be .shared::cta";
        if (!f.bulk_group || f.mbarrier || f.multicast) return "stores complete by .bulk_group";
        if (f.bytemask && (reduces || !target_has(k, FEATURE_SM100)))
            return ".cp_mask is for copies on sm_100 and later";
        if (!is_address(in, 0) || !is_address(in, 1) || !is_value(in, 2))
            return "operands: [destination], [source], size";
        in->exec = exec_bulk_store;
        wrong = read_tail(in, 3, &f);
    } else {
        bool from_global = !strcmp(f.spaces[1], "global");
        if (!from_global && strcmp(f.spaces[1], "shared::cta")) return "the source must be .global or .shared::cta";
        if (!f.mbarrier || f.bulk_group || f.bytemask)
            return "copies to shared memory complete by .mbarrier::complete_tx::bytes";
        if (f.multicast && !from_global) return "a multicast reads global memory";
        if (reduces && from_global) return "reductions into shared memory read .shared::cta";
        in->p[P_OWN_CTA] = !strcmp(f.spaces[0], "shared::cta");
        if (in->p[P_OWN_CTA] && (f.multicast || !from_global))
            return ".shared::cta is a destination of plain copies from .global";
        if (!is_address(in, 0) || !is_address(in, 1) || !is_value(in, 2) || !is_address(in, 3))
            return "operands: [destination], [source], size, [mbarrier]";
        in->p[P_SOURCE] = from_global ? FROM_GLOBAL : FROM_SHARED;
        in->exec = exec_bulk_load;
        wrong = read_tail(in, 4, &f);
    }
    if (wrong) return wrong;
    if (reduces) {
        in->p[P_REDUCTION] = reduction_find(f.op, f.type, f.bulk_group ? IN_GLOBAL : IN_SHARED);
        if (!in->p[P_REDUCTION]) return "no such operation on this type";
        bool half_add = !strcmp(f.op, "add") && (f.type == T_F16 || f.type == T_BF16);
        if (f.noftz != half_add) return ".noftz belongs to .add of .f16 and .bf16";
    } else if (f.noftz) {
        return "noftz";
    }
    return NULL;
}

static const char *decode_bulk_prefetch(inst *in, const kernel *k)
{
    words f;
    if (!target_has(k, FEATURE_SM90)) return needs_sm90;
    const char *wrong = read_words(in, 0, &f);
    if (wrong) return wrong;
    if (!f.l2 || f.nspaces != 1 || strcmp(f.spaces[0], "global") || f.op || f.type || f.noftz || f.bytemask ||
        f.mbarrier || f.bulk_group || f.multicast || f.group)
        return "it must be .L2.global";
    if (!is_address(in, 0) || !is_value(in, 1)) return "operands: [address], size";
    in->klass = C_TMA;
    in->exec = exec_bulk_prefetch;
    return read_tail(in, 2, &f);
}

static const char *decode_store_async(inst *in, const kernel *k)
{
    static const char *const allowed[] = {"weak",
                                          "relaxed",
                                          "cluster",
                                          "shared::cluster",
                                          "mbarrier::complete_tx::bytes",
                                          "v2",
                                          "v4",
                                          "b32",
                                          "b64",
                                          "u32",
                                          "u64",
                                          "s32",
                                          "s64",
                                          "f32",
                                          "f64",
                                          "add",
                                          "min",
                                          "max",
                                          "inc",
                                          "dec",
                                          "and",
                                          "or",
                                          "xor",
                                          NULL};
    if (!target_has(k, FEATURE_SM90)) return needs_sm90;
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (mod_index(in, "shared::cluster") < 0 || mod_index(in, "mbarrier::complete_tx::bytes") < 0)
        return ".shared::cluster.mbarrier::complete_tx::bytes is required";
    if (mod_index(in, "weak") >= 0 && mod_index(in, "relaxed") >= 0) return ".weak and .relaxed";
    type t = type_from(in->mod[in->mods - 1]);
    if (t == T_NONE) return "the type is missing";
    bool red = !strcmp(in->opcode, "red.async");
    const char *op = NULL;
    for (size_t i = 0; i < sizeof reduction_ops / sizeof *reduction_ops; i++)
        if (mod_index(in, reduction_ops[i]) >= 0) op = reduction_ops[i];
    if (red != (op != NULL)) return "an operation is for red.async, which needs one";
    in->p[P_TYPE] = (int32_t)t;
    in->p[P_VECTOR] = mod_index(in, "v2") >= 0 ? 2 : mod_index(in, "v4") >= 0 ? 4 : 1;
    if (in->p[P_VECTOR] * type_bytes(t) > CHUNK || (red && in->p[P_VECTOR] > 1)) return "the vector is too wide";
    if (in->nops != 3 || !is_address(in, 0) || !is_address(in, 2)) return "operands: [destination], value, [mbarrier]";
    const operand *v = &in->ops[1];
    if (v->kind == OP_VECTOR ? v->count != in->p[P_VECTOR] : in->p[P_VECTOR] != 1 || !is_value(in, 1))
        return "the value does not fit the vector";
    if (red) {
        in->p[P_REDUCTION] = reduction_find(op, t, IN_RED_ASYNC);
        if (!in->p[P_REDUCTION]) return "no such operation on this type";
    }
    in->klass = C_ASYNC_COPY;
    in->exec = exec_store_async;
    return NULL;
}

static const char *decode_store_bulk(inst *in, const kernel *k)
{
    static const char *const allowed[] = {"weak", "shared::cta", NULL};
    if (!target_has(k, FEATURE_SM100)) return "st.bulk needs a target of sm_100 or later";
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (in->nops != 3 || !is_address(in, 0) || !is_value(in, 1) || in->ops[2].kind != OP_IMM || in->ops[2].imm)
        return "operands: [address], size, 0";
    in->p[P_GENERIC] = mod_index(in, "shared::cta") < 0;
    in->klass = C_STORE;
    in->exec = exec_store_zeros;
    return NULL;
}

static const char *decode_try_cancel(inst *in, const kernel *k)
{
    static const char *const allowed[] = {
        "async", "shared::cta", "mbarrier::complete_tx::bytes", "multicast::cluster::all", "b128", NULL};
    if (!target_has(k, FEATURE_SM100)) return "clusterlaunchcontrol needs a target of sm_100 or later";
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (mod_index(in, "async") < 0 || mod_index(in, "mbarrier::complete_tx::bytes") < 0 || mod_index(in, "b128") < 0)
        return ".async, .mbarrier::complete_tx::bytes and .b128 are required";
    in->p[P_MULTICAST] = mod_index(in, "multicast::cluster::all") >= 0;
    if (in->p[P_MULTICAST] && !target_has(k, FEATURE_SM100AF))
        return ".multicast::cluster::all needs sm_100a or its family";
    if (in->nops != 2 || !is_address(in, 0) || !is_address(in, 1)) return "operands: [response], [mbarrier]";
    in->p[P_GENERIC] = mod_index(in, "shared::cta") < 0;
    in->klass = C_OTHER;
    in->exec = exec_try_cancel;
    return NULL;
}

static const char *decode_query_cancel(inst *in, const kernel *k)
{
    static const struct {
        const char *mods[3];
        int count, query;
    } forms[] = {
        {{"is_canceled", "pred", "b128"}, 3, QUERY_CANCELED}, {{"get_first_ctaid", "v4", "b32"}, 4, QUERY_CTAID},
        {{"get_first_ctaid::x", "b32", "b128"}, 3, QUERY_X},  {{"get_first_ctaid::y", "b32", "b128"}, 3, QUERY_Y},
        {{"get_first_ctaid::z", "b32", "b128"}, 3, QUERY_Z},
    };
    if (!target_has(k, FEATURE_SM100)) return "clusterlaunchcontrol needs a target of sm_100 or later";
    int form = -1;
    for (int i = 0; i < (int)(sizeof forms / sizeof *forms); i++) {
        if (in->mods != forms[i].count || strcmp(in->mod[in->mods - 1], "b128")) continue;
        bool same = true;
        for (int j = 0; j < 3; j++) same &= !strcmp(in->mod[j], forms[i].mods[j]);
        if (same) form = i;
    }
    if (form < 0) return "no such query";
    if (in->nops != 2 || in->ops[1].kind != OP_REG) return "operands: result, response";
    in->p[0] = forms[form].query;
    if (in->p[0] == QUERY_CTAID ? in->ops[0].kind != OP_VECTOR || in->ops[0].count != 4
                                : in->ops[0].kind != OP_REG && in->ops[0].kind != OP_SINK)
        return "the result does not fit the query";
    if (in->p[0] >= QUERY_X && in->ops[0].kind != OP_REG) return "the result must be a register";
    in->klass = C_OTHER;
    in->exec = exec_query_cancel;
    return NULL;
}

static const char *refuse_map_edit(inst *in, const kernel *k)
{
    (void)in, (void)k;
    return "editing tensor maps on the device is not supported";
}

const inst_row tma_rows[] = {
    {"cp.async.bulk.tensor", decode_tensor},
    {"cp.reduce.async.bulk.tensor", decode_reduce_tensor},
    {"cp.async.bulk.prefetch.tensor", decode_prefetch_tensor},
    {"cp.async.bulk", decode_bulk},
    {"cp.reduce.async.bulk", decode_bulk},
    {"cp.async.bulk.prefetch", decode_bulk_prefetch},
    {"st.async", decode_store_async},
    {"red.async", decode_store_async},
    {"st.bulk", decode_store_bulk},
    {"clusterlaunchcontrol.try_cancel", decode_try_cancel},
    {"clusterlaunchcontrol.query_cancel", decode_query_cancel},
    {"tensormap.replace", refuse_map_edit},
    {"tensormap.cp_fenceproxy", refuse_map_edit},
    {NULL, NULL},
};
