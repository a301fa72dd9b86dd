// PTX text to a module: declarations, scopes, labels, operands. What an instruction means is decode.c's business.
//
// The text is read twice over: declarations first (bodies are skipped), then the bodies, functions before entries, so
// that calls and addresses may point forward, and so that the functions of a module share one numbering of registers
// and instructions with each of its entries.
#include <ctype.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

// ------------------------------------------------------------------------------------------------------ memory

enum { CHUNK = 1 << 16 };
typedef struct chunk {
    struct chunk *next;
    size_t used, size;
    max_align_t data[];
} chunk;
struct arena {
    chunk *chunks;
};

static void *arena_alloc(struct arena *a, size_t size)
{
    size = (size + 15) & ~(size_t)15;
    if (!a->chunks || a->chunks->size - a->chunks->used < size) {
        size_t room = size > CHUNK ? size : CHUNK;
        chunk *c = malloc(sizeof *c + room);
        if (!c) return NULL;
        *c = (chunk){.next = a->chunks, .size = room};
        a->chunks = c;
    }
    void *p = (char *)a->chunks->data + a->chunks->used;
    a->chunks->used += size;
    return memset(p, 0, size);
}

static void arena_free(struct arena *a)
{
    if (!a) return;
    for (chunk *c = a->chunks, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    free(a);
}

// ------------------------------------------------------------------------------------------------------ parser

typedef enum { SYMBOL_REGISTER, SYMBOL_RANGE, SYMBOL_VARIABLE, SYMBOL_FUNCTION } symbol_kind;
typedef struct symbol {
    struct symbol *next; // of the same hash
    const char *name;
    size_t length;
    symbol_kind kind;
    int index, count; // register, variable or kernel; count: of a range
    int depth;
} symbol;

typedef struct {
    const char *name;
    size_t length;
    int scope, pc;
    operand *table; // .branchtargets
} label;

typedef struct {
    operand *o;
    const char *name;
    size_t length;
    int scope, line;
} reference;

typedef enum { WORD, NUMBER, STRING, MARK, END } token_kind;
typedef struct {
    token_kind kind;
    const char *text;
    size_t length;
    int line;
} token;

typedef struct {
    const char *text; // at the opening brace
    int line;
} body;

enum { HASH = 4096, MAX_DEPTH = 256, MAX_NESTING = 8, MAX_REGISTERS = 1 << 20, MAX_INSTS = 1 << 24 };

typedef struct {
    module *m;
    const char *at;
    int line;
    token now;
    jmp_buf failed;
    char *error;
    size_t error_size;
    FILE *unknown; // collect unknown instructions here instead of failing

    symbol *table[HASH];
    symbol **declared; // in order, for the end of their scope
    int ndeclared, room_declared;
    int depth;
    int scope, nscopes, room_scopes, *parent;
    label *labels;
    int nlabels, room_labels;
    reference *references;
    int nreferences, room_references;

    variable *globals; // module scope
    int nglobals, room_globals;
    size_t module_shared;
    body *bodies; // by kernel
    int room_kernels;
    inst *insts;
    int ninsts, room_insts;

    kernel *k;      // whose body is read
    kernel pending; // a function whose head is read
    int room_variables, room_regs;
    int source_file, source_line;
} parser;

static _Noreturn void fail(parser *p, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));
static _Noreturn void fail(parser *p, int line, const char *format, ...)
{
    int n = snprintf(p->error, p->error_size, "line %d: ", line);
    va_list args;
    va_start(args, format);
    if (n >= 0 && (size_t)n < p->error_size) vsnprintf(p->error + n, p->error_size - n, format, args);
    va_end(args);
    for (char *c = p->error; p->error_size && *c; c++) // the text may hold anything, the message is plain ASCII
        if ((unsigned char)*c >= 0x7f || (unsigned char)*c < ' ') *c = '?';
    longjmp(p->failed, 1);
}

static void *take(parser *p, size_t size)
{
    void *r = arena_alloc(p->m->memory, size);
    if (!r) fail(p, p->line, "out of memory");
    return r;
}

static const char *copy_text(parser *p, const char *s, size_t n)
{
    char *r = take(p, n + 1);
    memcpy(r, s, n);
    return r;
}

// Room for one more in a heap array.
static void *grow(parser *p, void *array, int used, int *room, size_t each)
{
    if (used < *room) return array;
    int more = *room ? 2 * *room : 64;
    void *r = realloc(array, more * each);
    if (!r) fail(p, p->line, "out of memory");
    *room = more;
    return r;
}
#define GROW(array, used, room) ((array) = grow(p, (array), (used), &(room), sizeof *(array)))

// ------------------------------------------------------------------------------------------------------ tokens

static bool word_start(char c)
{
    return isalpha((unsigned char)c) || c == '_' || c == '$' || c == '%' || c == '.';
}

static bool word_part(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%' || c == '.';
}

static void skip_space(parser *p)
{
    for (;;) {
        char c = *p->at;
        if (c == '\n') {
            p->line++;
            p->at++;
        } else if (c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v') {
            p->at++;
        } else if (c == '/' && p->at[1] == '/') {
            while (*p->at && *p->at != '\n') p->at++;
        } else if (c == '/' && p->at[1] == '*') {
            int line = p->line;
            for (p->at += 2; !(p->at[0] == '*' && p->at[1] == '/'); p->at++) {
                if (!*p->at) fail(p, line, "comment without end");
                p->line += *p->at == '\n';
            }
            p->at += 2;
        } else {
            return;
        }
    }
}

static void advance(parser *p)
{
    skip_space(p);
    const char *s = p->at;
    p->now = (token){.kind = MARK, .text = s, .length = 1, .line = p->line};
    if (!*s) {
        p->now.kind = END;
        p->now.length = 0;
    } else if (isdigit((unsigned char)*s)) {
        const char *e = s;
        bool hex =
            s[0] == '0' && (s[1] == 'x' || s[1] == 'X' || s[1] == 'f' || s[1] == 'F' || s[1] == 'd' || s[1] == 'D');
        while (isalnum((unsigned char)*e) || *e == '.' ||
               (!hex && (*e == '+' || *e == '-') && (e[-1] == 'e' || e[-1] == 'E')))
            e++;
        p->now.kind = NUMBER;
        p->now.length = e - s;
        p->at = e;
    } else if (word_start(*s)) {
        const char *e = s;
        bool directive = *s == '.'; // ".reg.b16" are two words
        while ((word_part(*e) && !(directive && *e == '.' && e > s)) || (e[0] == ':' && e[1] == ':' && word_part(e[2])))
            e += *e == ':' ? 2 : 1;
        p->now.kind = WORD;
        p->now.length = e - s;
        p->at = e;
    } else if (*s == '"') {
        const char *e = s + 1;
        while (*e && *e != '"' && *e != '\n') e += e[0] == '\\' && e[1] && e[1] != '\n' ? 2 : 1;
        if (*e != '"') fail(p, p->line, "string without end");
        p->now.kind = STRING;
        p->now.text = s + 1;
        p->now.length = e - s - 1;
        p->at = e + 1;
    } else {
        p->at = s + 1;
    }
}

static bool is(const parser *p, const char *text)
{
    return p->now.kind != END && p->now.kind != STRING && strlen(text) == p->now.length &&
           !memcmp(text, p->now.text, p->now.length);
}

static bool accept(parser *p, const char *text)
{
    if (!is(p, text)) return false;
    advance(p);
    return true;
}

static _Noreturn void fail_here(parser *p, const char *wanted)
{
    if (p->now.kind == END) fail(p, p->now.line, "end of text, but %s was expected", wanted);
    int n = p->now.length > 80 ? 80 : (int)p->now.length;
    fail(p, p->now.line, "'%.*s', but %s was expected", n, p->now.text, wanted);
}

static void expect(parser *p, const char *text)
{
    if (!accept(p, text)) fail_here(p, text);
}

static token expect_word(parser *p, const char *what)
{
    token t = p->now;
    if (t.kind != WORD) fail_here(p, what);
    advance(p);
    return t;
}

// Past the brace that closes the one that is the current token. Bodies, and debug sections (DWARF as .b8 lists).
static void skip_braces(parser *p)
{
    int depth = 0, line = p->now.line;
    do {
        if (p->now.kind == END) fail(p, line, "'{' without '}'");
        if (is(p, "{")) depth++;
        if (is(p, "}")) depth--;
        advance(p);
    } while (depth);
}

static void skip_past_semicolon(parser *p)
{
    while (!is(p, ";")) {
        if (p->now.kind == END) fail_here(p, ";");
        advance(p);
    }
    advance(p);
}

// ----------------------------------------------------------------------------------------------------- symbols

static unsigned hash_of(const char *s, size_t n)
{
    unsigned h = 2166136261u;
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 16777619u;
    return h % HASH;
}

static symbol *find(const parser *p, const char *name, size_t length, bool range)
{
    for (symbol *s = p->table[hash_of(name, length)]; s; s = s->next)
        if (s->length == length && (s->kind == SYMBOL_RANGE) == range && !memcmp(s->name, name, length)) return s;
    return NULL;
}

static void declare(parser *p, symbol_kind kind, token name, int index, int count)
{
    symbol *old = find(p, name.text, name.length, kind == SYMBOL_RANGE);
    if (old && old->depth == p->depth && kind != SYMBOL_FUNCTION)
        fail(p, name.line, "%.*s is declared twice", (int)name.length, name.text);
    symbol *s = take(p, sizeof *s);
    unsigned h = hash_of(name.text, name.length);
    *s = (symbol){p->table[h], name.text, name.length, kind, index, count, p->depth};
    p->table[h] = s;
    GROW(p->declared, p->ndeclared, p->room_declared)[p->ndeclared] = s;
    p->ndeclared++;
}

static void push_scope(parser *p)
{
    if (++p->depth > MAX_DEPTH) fail(p, p->line, "scopes nested too deeply");
    GROW(p->parent, p->nscopes, p->room_scopes)[p->nscopes] = p->scope;
    p->scope = p->nscopes++;
}

static void pop_scope(parser *p)
{
    while (p->ndeclared && p->declared[p->ndeclared - 1]->depth == p->depth) {
        symbol *s = p->declared[--p->ndeclared];
        p->table[hash_of(s->name, s->length)] = s->next;
    }
    p->depth--;
    p->scope = p->parent[p->scope];
}

// A register of this name: declared alone, or as %r of a range %r<100>.
static int find_register(const parser *p, const char *name, size_t length)
{
    symbol *best = find(p, name, length, false);
    int index = best && best->kind == SYMBOL_REGISTER ? best->index : -1;
    if (best && best->kind != SYMBOL_REGISTER) return -1;
    for (size_t n = length; n > 1 && isdigit((unsigned char)name[n - 1]) && length - n < 8; n--) {
        if (name[n - 1] == '0' && n < length) continue; // %r07 is no member
        symbol *s = find(p, name, n - 1, true);
        if (!s || (best && s->depth < best->depth)) continue;
        int number = 0;
        for (size_t i = n - 1; i < length; i++) number = 10 * number + (name[i] - '0');
        if (number >= s->count) continue;
        best = s;
        index = s->index + number;
    }
    return index;
}

// -------------------------------------------------------------------------------------- constant expressions

typedef struct {
    int64_t bits;
    int literal; // LITERAL_INTEGER, LITERAL_F32, LITERAL_F64
    bool is_unsigned;
} constant;

static int hex_digits(const char *s, size_t n, uint64_t *value)
{
    *value = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isxdigit((unsigned char)s[i])) return -1;
        *value = *value << 4 | (uint64_t)(isdigit((unsigned char)s[i]) ? s[i] - '0' : (s[i] | 32) - 'a' + 10);
    }
    return (int)n;
}

// PTX ISA, "Constants".
static constant number(parser *p)
{
    token t = p->now;
    constant c = {0};
    const char *s = t.text;
    size_t n = t.length;
    uint64_t bits;
    bool bad = false;
    if (n > 1 && s[0] == '0' && (s[1] == 'f' || s[1] == 'F')) {
        bad = n != 10 || hex_digits(s + 2, 8, &bits) < 0;
        c = (constant){bad ? 0 : (int64_t)bits, LITERAL_F32, false};
    } else if (n > 1 && s[0] == '0' && (s[1] == 'd' || s[1] == 'D')) {
        bad = n != 18 || hex_digits(s + 2, 16, &bits) < 0;
        c = (constant){bad ? 0 : (int64_t)bits, LITERAL_F64, false};
    } else if (!(n > 1 && s[0] == '0' && (s[1] | 32) == 'x') &&
               (memchr(s, '.', n) || memchr(s, 'e', n) || memchr(s, 'E', n))) {
        char copy[64], *end;
        bad = n >= sizeof copy;
        if (!bad) {
            memcpy(copy, s, n);
            copy[n] = 0;
            double d = strtod(copy, &end);
            bad = *end != 0;
            memcpy(&c.bits, &d, 8);
        }
        c.literal = LITERAL_F64;
    } else {
        if (n > 1 && (s[n - 1] == 'U' || s[n - 1] == 'u')) {
            c.is_unsigned = true;
            n--;
        }
        int base = 10;
        size_t i = 0;
        if (n > 2 && s[0] == '0' && (s[1] | 32) == 'x')
            base = 16, i = 2;
        else if (n > 2 && s[0] == '0' && (s[1] | 32) == 'b')
            base = 2, i = 2;
        else if (n > 1 && s[0] == '0')
            base = 8, i = 1;
        uint64_t value = 0;
        for (; i < n; i++) {
            int d = isdigit((unsigned char)s[i])    ? s[i] - '0'
                    : isxdigit((unsigned char)s[i]) ? (s[i] | 32) - 'a' + 10
                                                    : 99;
            if (d >= base || value > (UINT64_MAX - (uint64_t)d) / (uint64_t)base) {
                bad = true;
                break;
            }
            value = value * (uint64_t)base + (uint64_t)d;
        }
        c.bits = (int64_t)value;
        c.is_unsigned |= value > INT64_MAX;
    }
    if (bad) fail(p, t.line, "'%.*s' is no number", n > 40 ? 40 : (int)n, s);
    advance(p);
    return c;
}

static constant expression(parser *p, int nesting, int level);

static bool starts_constant(const parser *p)
{
    if (p->now.kind == NUMBER) return true;
    if (p->now.kind != MARK) return false;
    char c = *p->now.text;
    return c == '-' || c == '+' || c == '~' || c == '(';
}

static constant unary(parser *p, int nesting)
{
    if (nesting > 32) fail(p, p->line, "constant expression nested too deeply");
    if (p->now.kind == NUMBER) return number(p);
    int line = p->now.line;
    if (accept(p, "WARP_SZ")) return (constant){.bits = LANES};
    if (accept(p, "(")) {
        if (is(p, ".s64") || is(p, ".u64")) {
            bool u = is(p, ".u64");
            advance(p);
            expect(p, ")");
            constant c = unary(p, nesting + 1);
            c.is_unsigned = u;
            return c;
        }
        constant c = expression(p, nesting + 1, 0);
        expect(p, ")");
        return c;
    }
    if (p->now.kind != MARK || !strchr("+-~!", *p->now.text)) fail_here(p, "a constant");
    char op = *p->now.text;
    advance(p);
    constant c = unary(p, nesting + 1);
    if (c.literal != LITERAL_INTEGER) {
        if (op == '-')
            c.bits ^= c.literal == LITERAL_F32 ? 0x80000000 : INT64_MIN;
        else if (op != '+')
            fail(p, line, "operator %c of a float constant", op);
        return c;
    }
    if (op == '-') c.bits = (int64_t)(0 - (uint64_t)c.bits);
    if (op == '~') c.bits = ~c.bits;
    if (op == '!') c.bits = !c.bits;
    return c;
}

static int binary_level(const char *s, int *length)
{
    static const struct {
        const char *text;
        int level;
    } operators[] = {{"<<", 8}, {">>", 8}, {"<=", 7}, {">=", 7}, {"==", 6}, {"!=", 6}, {"&&", 2}, {"||", 1}, {"*", 10},
                     {"/", 10}, {"%", 10}, {"+", 9},  {"-", 9},  {"<", 7},  {">", 7},  {"&", 5},  {"^", 4},  {"|", 3}};
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
        *length = (int)strlen(operators[i].text);
        if (!strncmp(s, operators[i].text, (size_t)*length)) return operators[i].level;
    }
    return -1;
}

static constant apply(parser *p, int line, const char *op, constant a, constant b)
{
    if (a.literal || b.literal) fail(p, line, "arithmetic on float constants");
    constant r = {.is_unsigned = a.is_unsigned || b.is_unsigned};
    uint64_t x = (uint64_t)a.bits, y = (uint64_t)b.bits, v = 0;
    bool u = r.is_unsigned;
    if ((op[0] == '/' || op[0] == '%') && (!y || (!u && b.bits == -1 && a.bits == INT64_MIN)))
        fail(p, line, "division by zero in a constant expression");
    switch (op[0]) {
    case '*': v = x * y; break;
    case '/': v = u ? x / y : (uint64_t)(a.bits / b.bits); break;
    case '%': v = u ? x % y : (uint64_t)(a.bits % b.bits); break;
    case '+': v = x + y; break;
    case '-': v = x - y; break;
    case '^': v = x ^ y; break;
    case '=': v = x == y; break;
    case '!': v = x != y; break;
    case '&': v = op[1] == '&' ? x && y : x & y; break;
    case '|': v = op[1] == '|' ? x || y : x | y; break;
    case '<':
        v = op[1] == '<'   ? (y < 64 ? x << y : 0)
            : op[1] == '=' ? (u ? x <= y : a.bits <= b.bits)
            : u            ? x < y
                           : a.bits < b.bits;
        break;
    case '>':
        if (op[1] == '>')
            v = u ? (y < 64 ? x >> y : 0) : (uint64_t)(a.bits >> (y < 63 ? y : 63));
        else
            v = op[1] == '=' ? (u ? x >= y : a.bits >= b.bits) : u ? x > y : a.bits > b.bits;
        break;
    }
    r.bits = (int64_t)v;
    return r;
}

static constant expression(parser *p, int nesting, int level)
{
    constant a = unary(p, nesting);
    for (;;) {
        int length, l = p->now.kind == MARK || (p->now.kind == WORD && *p->now.text == '%' && p->now.length == 1)
                            ? binary_level(p->now.text, &length)
                            : -1;
        if (l < 0 || l <= level) break;
        const char *op = p->now.text;
        int line = p->now.line;
        p->at = p->now.text + length;
        advance(p);
        a = apply(p, line, op, a, expression(p, nesting + 1, l));
    }
    if (level == 0 && is(p, "?")) {
        advance(p);
        constant b = expression(p, nesting + 1, 0);
        expect(p, ":");
        constant c = expression(p, nesting + 1, 0);
        return a.bits ? b : c;
    }
    return a;
}

static int64_t integer(parser *p, int64_t low, int64_t high, const char *what)
{
    int line = p->now.line;
    constant c = expression(p, 0, 0);
    if (c.literal || c.bits < low || c.bits > high) fail(p, line, "%s: out of range", what);
    return c.bits;
}

// ---------------------------------------------------------------------------------------------------- operands

static operand *new_items(parser *p, int count)
{
    return take(p, sizeof(operand) * (count ? count : 1));
}

static void set_constant(operand *o, constant c)
{
    o->kind = OP_IMM;
    o->imm = c.bits;
    o->literal = c.literal;
}

static void refer_to_label(parser *p, operand *o, token name)
{
    *o = (operand){.kind = OP_LABEL, .reg = -1, .symbol = -1};
    GROW(p->references, p->nreferences, p->room_references);
    p->references[p->nreferences++] = (reference){o, name.text, name.length, p->scope, name.line};
}

static int64_t offset_after(parser *p)
{
    if (is(p, "+") || is(p, "-")) {
        bool minus = is(p, "-");
        advance(p);
        int line = p->now.line;
        constant c = unary(p, 0);
        if (c.literal) fail(p, line, "a float in an address");
        return minus ? (int64_t)(0 - (uint64_t)c.bits) : c.bits;
    }
    return 0;
}

static void name_operand(parser *p, operand *o, bool in_bracket, bool label_wanted)
{
    token t = expect_word(p, "an operand");
    *o = (operand){.reg = -1, .symbol = -1};
    if (t.length == 1 && *t.text == '_') {
        o->kind = OP_SINK;
        return;
    }
    if (label_wanted) {
        refer_to_label(p, o, t);
        return;
    }
    int reg = find_register(p, t.text, t.length);
    symbol *s = find(p, t.text, t.length, false);
    if (reg >= 0) {
        o->kind = in_bracket ? OP_ADDRESS : OP_REG;
        o->reg = reg;
        if (in_bracket) o->imm = offset_after(p);
    } else if (s && s->kind == SYMBOL_VARIABLE) {
        o->kind = OP_ADDRESS;
        o->symbol = s->index;
        o->imm = offset_after(p);
    } else if (s && s->kind == SYMBOL_FUNCTION) {
        o->kind = OP_FUNCTION;
        o->symbol = s->index;
    } else if (t.length == 7 && !memcmp(t.text, "WARP_SZ", 7)) {
        o->kind = OP_IMM;
        o->imm = LANES;
    } else if (*t.text == '%') {
        o->kind = OP_SPECIAL;
        o->special = special_index(t.text, t.length);
        if (o->special < 0) fail(p, t.line, "unknown register %.*s", t.length > 60 ? 60 : (int)t.length, t.text);
    } else {
        refer_to_label(p, o, t);
    }
}

static void one_operand(parser *p, operand *o, int nesting, bool in_bracket, bool label_wanted);

// Operands are read on the stack; references to labels among them move along when they are stored.
static void move_references(parser *p, int first, const operand *from, int count, operand *to)
{
    for (int i = first; i < p->nreferences; i++) {
        const operand *o = p->references[i].o;
        if (o >= from && o < from + count) p->references[i].o = to + (o - from);
    }
}

static void list(parser *p, operand *o, operand_kind kind, const char *close, int nesting, bool in_bracket)
{
    operand items[256];
    int count = 0, first = p->nreferences;
    while (!is(p, close)) {
        if (count == 256) fail(p, p->now.line, "more than 256 operands");
        operand *item = &items[count++];
        one_operand(p, item, nesting + 1, in_bracket, false);
        if (!accept(p, ",") && !is(p, close)) fail_here(p, close);
    }
    advance(p);
    *o = (operand){.kind = kind, .reg = -1, .symbol = -1, .count = count, .items = new_items(p, count)};
    memcpy(o->items, items, sizeof *items * count);
    move_references(p, first, items, count, o->items);
}

static void one_operand(parser *p, operand *o, int nesting, bool in_bracket, bool label_wanted)
{
    if (nesting > MAX_NESTING) fail(p, p->now.line, "operands nested too deeply");
    *o = (operand){.reg = -1, .symbol = -1};
    if (accept(p, "{")) {
        list(p, o, OP_VECTOR, "}", nesting, false);
    } else if (accept(p, "[")) {
        list(p, o, OP_BRACKET, "]", nesting, true);
        for (int i = 0; i < o->count; i++) { // [64]: an absolute address
            operand *item = &o->items[i];
            if (i == 0 && item->kind == OP_IMM) item->kind = OP_ADDRESS, item->reg = -1, item->symbol = -1;
        }
    } else if (is(p, "!")) {
        advance(p);
        if (starts_constant(p)) {
            constant c = expression(p, 0, 0);
            set_constant(o, (constant){.bits = !c.bits});
        } else {
            name_operand(p, o, in_bracket, false);
            if (o->kind != OP_REG) fail_here(p, "a predicate after '!'");
            o->negated = true;
        }
    } else if (starts_constant(p)) {
        set_constant(o, expression(p, 0, 0));
    } else {
        name_operand(p, o, in_bracket, label_wanted);
    }
    if (is(p, "|") && !in_bracket && nesting == 0) {
        advance(p);
        operand *items = new_items(p, 2);
        items[0] = *o;
        name_operand(p, &items[1], false, false);
        for (int i = 0; i < 2; i++)
            if (items[i].kind != OP_REG && items[i].kind != OP_SINK) fail_here(p, "a pair of registers before it");
        *o = (operand){.kind = OP_PAIR, .reg = -1, .symbol = -1, .items = items, .count = 2};
    }
}

// ------------------------------------------------------------------------------------------------ declarations

static type expect_type(parser *p)
{
    type t = p->now.kind == WORD && *p->now.text == '.' && p->now.length < 16 ? T_PRED : T_NONE;
    if (t) {
        char name[16];
        memcpy(name, p->now.text + 1, p->now.length - 1);
        name[p->now.length - 1] = 0;
        t = type_from(name);
    }
    if (!t) fail_here(p, "a type");
    advance(p);
    return t;
}

static size_t align_up(size_t n, size_t align)
{
    return (n + align - 1) / align * align;
}

static void add_register(parser *p, type t)
{
    kernel *k = p->k;
    if (k->regs >= MAX_REGISTERS) fail(p, p->line, "too many registers");
    k->reg_type = grow(p, k->reg_type, k->regs, &p->room_regs, sizeof *k->reg_type);
    k->reg_type[k->regs++] = t;
}

static void reg_declaration(parser *p)
{
    if (is(p, ".v2") || is(p, ".v4") || is(p, ".v8")) fail(p, p->now.line, "vector registers are not known");
    type t = expect_type(p);
    do {
        token name = expect_word(p, "a register's name");
        int count = 1, first = p->k->regs;
        if (accept(p, "<")) {
            constant c = expression(p, 0, 8); // no comparison: '>' ends it
            if (c.literal || c.bits < 0 || c.bits > MAX_REGISTERS)
                fail(p, name.line, "number of registers: out of range");
            count = (int)c.bits;
            expect(p, ">");
            if (count > MAX_REGISTERS - first) fail(p, name.line, "too many registers");
            declare(p, SYMBOL_RANGE, name, first, count);
        } else {
            declare(p, SYMBOL_REGISTER, name, first, 1);
        }
        for (int i = 0; i < count; i++) {
            add_register(p, t);
            if (t == T_B128) add_register(p, t);
        }
    } while (accept(p, ","));
    expect(p, ";");
}

typedef struct {
    variable v;
    token name;
    bool has_array, open; // open: [] without a size
} declarator;

// [.align N] [.ptr ...] [.v2] .type name[sizes]: what stands between a state space and an initial value.
static declarator declare_variable(parser *p, space s)
{
    declarator d = {.v = {.space = s}};
    int vector = 1;
    for (;;) {
        if (accept(p, ".align")) {
            d.v.align = (size_t)integer(p, 1, 1 << 16, ".align");
            if (d.v.align & (d.v.align - 1)) fail(p, p->now.line, ".align: no power of two");
        } else if (accept(p, ".v2")) {
            vector = 2;
        } else if (accept(p, ".v4")) {
            vector = 4;
        } else if (accept(p, ".attribute")) {
            expect(p, "(");
            while (!accept(p, ")")) {
                if (p->now.kind == END) fail_here(p, ")");
                advance(p);
            }
        } else {
            break;
        }
    }
    d.v.type = expect_type(p);
    size_t each = (size_t)type_bytes(d.v.type) * (size_t)vector;
    if (s == SPACE_PARAM && accept(p, ".ptr")) {
        while (is(p, ".global") || is(p, ".shared") || is(p, ".const") || is(p, ".local") || is(p, ".generic"))
            advance(p);
        if (accept(p, ".align")) integer(p, 1, 1 << 16, ".align");
    }
    if (d.v.align < each && !d.v.align) d.v.align = each ? each : 1;
    d.name = expect_word(p, "a name");
    d.v.name = copy_text(p, d.name.text, d.name.length);
    size_t elements = 1;
    while (accept(p, "[")) {
        d.has_array = true;
        if (accept(p, "]")) {
            if (d.open) fail_here(p, "a size");
            d.open = true;
            continue;
        }
        elements *= (size_t)integer(p, 0, 1 << 28, "array size");
        if (elements > (size_t)1 << 30) fail(p, d.name.line, "array too large");
        expect(p, "]");
    }
    d.v.size = each * elements;
    return d;
}

static int add_global(parser *p, variable v, token name)
{
    GROW(p->globals, p->nglobals, p->room_globals)[p->nglobals] = v;
    declare(p, SYMBOL_VARIABLE, name, p->nglobals, 1);
    return p->nglobals++;
}

static int add_variable(parser *p, variable v, token name)
{
    kernel *k = p->k;
    k->variables = grow(p, k->variables, k->nvariables, &p->room_variables, sizeof *k->variables);
    k->variables[k->nvariables] = v;
    declare(p, SYMBOL_VARIABLE, name, k->nvariables, 1);
    return k->nvariables++;
}

static void put_bits(unsigned char *to, size_t bytes, uint64_t value)
{
    for (size_t i = 0; i < bytes; i++) to[i] = (unsigned char)(value >> 8 * i);
}

// The values of an array, in braces and nested braces; an address is a variable's, with generic() or without.
static void initial_values(parser *p, const variable *v, unsigned char *data, size_t each, size_t *used, int nesting)
{
    if (nesting > MAX_NESTING) fail(p, p->now.line, "initial values nested too deeply");
    if (accept(p, "{")) {
        while (!is(p, "}")) {
            initial_values(p, v, data, each, used, nesting + 1);
            if (!accept(p, ",") && !is(p, "}")) fail_here(p, "}");
        }
        advance(p);
        return;
    }
    if (*used + each > v->size) fail(p, p->now.line, "%s: more initial values than elements", v->name);
    uint64_t bits;
    if (p->now.kind == WORD && !is(p, "WARP_SZ")) {
        bool generic = accept(p, "generic");
        if (generic) expect(p, "(");
        token t = expect_word(p, "a variable");
        if (generic) expect(p, ")");
        symbol *s = find(p, t.text, t.length, false);
        if (!s || s->kind != SYMBOL_VARIABLE ||
            (p->globals[s->index].space != SPACE_GLOBAL && p->globals[s->index].space != SPACE_CONST))
            fail(p, t.line, "%.*s: only a global or constant variable's address can be an initial value", (int)t.length,
                 t.text);
        bits = p->globals[s->index].offset + (uint64_t)offset_after(p);
    } else {
        constant c = expression(p, 0, 0);
        bits = (uint64_t)c.bits;
        double d;
        memcpy(&d, &bits, 8);
        if (c.literal == LITERAL_F64 && v->type == T_F32) {
            float f = (float)d;
            uint32_t b;
            memcpy(&b, &f, 4);
            bits = b;
        }
    }
    put_bits(data + *used, each, bits);
    *used += each;
}

static void module_variable(parser *p, space s, bool is_extern)
{
    do {
        declarator d = declare_variable(p, s);
        if (s == SPACE_SHARED) {
            d.v.external = is_extern && (d.open || !d.v.size);
            if (!d.v.external) {
                d.v.offset = align_up(SHARED_RESERVED + p->module_shared, d.v.align);
                p->module_shared = d.v.offset + d.v.size - SHARED_RESERVED;
            }
            add_global(p, d.v, d.name);
            continue;
        }
        if (is_extern) fail(p, d.name.line, "%s: an external variable, and nothing is linked", d.v.name);
        unsigned char *data = aligned_alloc(256, align_up(d.v.size ? d.v.size : 1, 256));
        if (!data) fail(p, d.name.line, "out of memory");
        memset(data, 0, align_up(d.v.size ? d.v.size : 1, 256));
        d.v.initial = data;
        d.v.offset = d.v.size ? ptxsim_register(data, d.v.size, false) : 0;
        int index = add_global(p, d.v, d.name);
        if (accept(p, "=")) {
            size_t used = 0;
            initial_values(p, &p->globals[index], data, (size_t)type_bytes(d.v.type), &used, 0);
        }
    } while (accept(p, ","));
    expect(p, ";");
}

static void dimensions(parser *p, int d[3], const char *what)
{
    d[0] = d[1] = d[2] = 1;
    for (int i = 0; i < 3; i++) {
        d[i] = (int)integer(p, 1, INT32_MAX, what);
        if (!accept(p, ",")) break;
    }
}

// ".maxntid 128, 1, 1" and its kin, between an entry's parameters and its body.
static void performance_directives(parser *p, kernel *k)
{
    while (p->now.kind == WORD) {
        int unused[3];
        if (accept(p, ".maxntid"))
            dimensions(p, k->maxntid, ".maxntid");
        else if (accept(p, ".reqntid"))
            dimensions(p, k->reqntid, ".reqntid");
        else if (accept(p, ".minnctapersm"))
            k->minnctapersm = (int)integer(p, 1, 64, ".minnctapersm");
        else if (accept(p, ".maxnctapersm"))
            integer(p, 1, 64, ".maxnctapersm");
        else if (accept(p, ".maxnreg"))
            k->maxnreg = (int)integer(p, 1, 256, ".maxnreg");
        else if (accept(p, ".reqnctapercluster"))
            dimensions(p, k->reqnctapercluster, ".reqnctapercluster");
        else if (accept(p, ".maxclusterrank"))
            integer(p, 1, 64, ".maxclusterrank");
        else if (accept(p, ".explicitcluster"))
            k->explicit_cluster = true;
        else if (accept(p, ".blocksareclusters"))
            fail(p, p->now.line, ".blocksareclusters is not known");
        else if (accept(p, ".noreturn"))
            continue;
        else if (accept(p, ".abi_preserve") || accept(p, ".abi_preserve_control"))
            dimensions(p, unused, ".abi_preserve");
        else if (accept(p, ".pragma"))
            skip_past_semicolon(p);
        else
            fail_here(p, "'{' or ';'");
    }
}

// (.param .b32 a, ...): their places in the parameter block, or in the frame of a function.
static void parameters(parser *p, kernel *k)
{
    while (!is(p, ")")) {
        if (is(p, ".reg")) fail(p, p->now.line, "parameters in registers are not known");
        expect(p, ".param");
        declarator d = declare_variable(p, SPACE_PARAM);
        size_t *block = k->is_entry ? &k->param_bytes : &k->frame_bytes;
        d.v.space = k->is_entry ? SPACE_PARAM : SPACE_LOCAL;
        d.v.offset = align_up(*block, d.v.align);
        *block = d.v.offset + d.v.size;
        if (*block > 1 << 20) fail(p, d.name.line, "too many parameters");
        k->variables = grow(p, k->variables, k->nvariables, &p->room_variables, sizeof *k->variables);
        k->variables[k->nvariables++] = d.v;
        k->nparams++;
        if (!accept(p, ",") && !is(p, ")")) fail_here(p, ")");
    }
    advance(p);
}

static void function(parser *p, bool is_entry)
{
    kernel *k = &p->pending;
    *k = (kernel){.module = p->m, .is_entry = is_entry, .first = -1};
    p->room_variables = 0;
    if (!is_entry && accept(p, "(")) {
        parameters(p, k);
        k->returns = k->nparams;
    }
    token name = expect_word(p, "a function's name");
    k->name = copy_text(p, name.text, name.length);
    if (accept(p, "(")) parameters(p, k);
    performance_directives(p, k);

    int index = -1;
    symbol *old = find(p, name.text, name.length, false);
    if (old && old->kind == SYMBOL_FUNCTION)
        index = old->index; // its declaration came before
    else if (old)
        fail(p, name.line, "%s is declared twice", k->name);
    if (index < 0) {
        index = p->m->count;
        if (index == p->room_kernels) {
            int room = index ? 2 * index : 16;
            kernel *kernels = realloc(p->m->kernels, room * sizeof *kernels);
            if (kernels) p->m->kernels = kernels;
            body *bodies = realloc(p->bodies, room * sizeof *bodies);
            if (bodies) p->bodies = bodies;
            if (!kernels || !bodies) fail(p, name.line, "out of memory");
            p->room_kernels = room;
        }
        p->m->count++;
        p->bodies[index].text = NULL;
        declare(p, SYMBOL_FUNCTION, name, index, 1);
    } else {
        free(p->m->kernels[index].variables);
    }
    p->m->kernels[index] = *k;
    *k = (kernel){0};
    if (is(p, "{")) {
        if (p->bodies[index].text) fail(p, name.line, "%.*s has two bodies", (int)name.length, name.text);
        p->bodies[index] = (body){p->now.text, p->now.line};
        p->m->kernels[index].has_body = true;
        skip_braces(p);
    } else {
        expect(p, ";");
    }
}

// ------------------------------------------------------------------------------------------------------ bodies

static void location(parser *p)
{
    p->source_file = (int)integer(p, 0, INT32_MAX, ".loc");
    p->source_line = (int)integer(p, 0, INT32_MAX, ".loc");
    integer(p, 0, INT32_MAX, ".loc");
    while (accept(p, ",")) { // function_name L+4, inlined_at file line column
        if (accept(p, "function_name")) {
            expect_word(p, "a label");
            offset_after(p);
        } else {
            expect(p, "inlined_at");
            for (int i = 0; i < 3; i++) integer(p, 0, INT32_MAX, ".loc");
        }
    }
}

static void file(parser *p)
{
    module *m = p->m;
    int index = (int)integer(p, 0, 1 << 16, ".file");
    if (p->now.kind != STRING) fail_here(p, "a file's name");
    const char *name = copy_text(p, p->now.text, p->now.length);
    advance(p);
    while (accept(p, ",")) integer(p, 0, INT64_MAX, ".file");
    if (index >= m->nfiles) {
        const char **files = realloc(m->files, (index + 1) * sizeof *files);
        if (!files) fail(p, p->line, "out of memory");
        for (int i = m->nfiles; i <= index; i++) files[i] = "";
        m->files = files;
        m->nfiles = index + 1;
    }
    m->files[index] = name;
}

static void split_modifiers(parser *p, inst *in)
{
    int count = 0;
    for (const char *s = in->text; *s; s++) count += *s == '.';
    in->mod = take(p, sizeof *in->mod * (count ? count : 1));
    char *copy = (char *)copy_text(p, in->text, strlen(in->text));
    for (char *s = strchr(copy, '.'); s; s = strchr(s + 1, '.')) {
        *s = 0;
        in->mod[in->mods++] = s + 1;
    }
}

static void define_label(parser *p, token name, operand *table)
{
    for (int i = p->nlabels - 1; i >= 0 && p->labels[i].scope >= p->scope; i--)
        if (p->labels[i].scope == p->scope && p->labels[i].length == name.length &&
            !memcmp(p->labels[i].name, name.text, name.length))
            fail(p, name.line, "label %.*s is defined twice", (int)name.length, name.text);
    GROW(p->labels, p->nlabels, p->room_labels)
    [p->nlabels] = (label){name.text, name.length, p->scope, p->ninsts, table};
    p->nlabels++;
}

static void instruction(parser *p)
{
    inst in = {.guard = -1, .source_file = p->source_file, .source_line = p->source_line};
    if (accept(p, "@")) {
        in.guard_negated = accept(p, "!");
        token t = expect_word(p, "a predicate");
        in.guard = find_register(p, t.text, t.length);
        if (in.guard < 0 || p->k->reg_type[in.guard] != T_PRED)
            fail(p, t.line, "%.*s is no predicate", t.length > 60 ? 60 : (int)t.length, t.text);
    }
    token word = expect_word(p, "an instruction");
    if (word.length > 250) fail(p, word.line, "'%.60s...' is no instruction", word.text);
    in.line = word.line;
    in.text = copy_text(p, word.text, word.length);
    split_modifiers(p, &in);
    bool branch = (!strncmp(in.text, "bra", 3) && (in.text[3] == '.' || !in.text[3])) || !strncmp(in.text, "brx.", 4);

    operand ops[16];
    int first = p->nreferences;
    while (!is(p, ";")) {
        if (in.nops == 16) fail(p, word.line, "%s: too many operands", in.text);
        operand *o = &ops[in.nops++];
        if (!strncmp(in.text, "call", 4) && accept(p, "("))
            list(p, o, OP_VECTOR, ")", 0, false);
        else
            one_operand(p, o, 0, false, branch && (in.text[2] == 'a' || in.nops == 2));
        if (!accept(p, ",") && !is(p, ";")) fail_here(p, "';'");
    }
    advance(p);
    in.ops = new_items(p, in.nops);
    memcpy(in.ops, ops, sizeof *ops * in.nops);
    move_references(p, first, ops, in.nops, in.ops);
    if (p->ninsts >= MAX_INSTS) fail(p, word.line, "too many instructions");
    GROW(p->insts, p->ninsts, p->room_insts)[p->ninsts] = in;
    p->ninsts++;
}

// Variables declared inside a body. A .param there is the caller's side of a call: it lives in the thread's frame.
static void body_variable(parser *p, space s)
{
    kernel *k = p->k;
    do {
        declarator d = declare_variable(p, s);
        if (s == SPACE_SHARED) {
            d.v.offset = align_up(SHARED_RESERVED + k->shared_bytes, d.v.align);
            k->shared_bytes = d.v.offset + d.v.size - SHARED_RESERVED;
        } else {
            d.v.space = SPACE_LOCAL;
            d.v.offset = align_up(k->frame_bytes, d.v.align);
            k->frame_bytes = d.v.offset + d.v.size;
            if (k->frame_bytes > 1 << 24) fail(p, d.name.line, "more than 16 MiB of local memory");
        }
        add_variable(p, d.v, d.name);
    } while (accept(p, ","));
    expect(p, ";");
}

static void statement(parser *p)
{
    if (p->now.kind == MARK && *p->now.text == '@') {
        instruction(p);
        return;
    }
    if (accept(p, ";")) return;
    if (p->now.kind != WORD) fail_here(p, "an instruction");
    if (*p->now.text != '.') {
        const char *s = p->at; // a label is a word and a colon
        while (*s == ' ' || *s == '\t') s++;
        if (*s != ':') {
            instruction(p);
            return;
        }
        token name = expect_word(p, "a label");
        expect(p, ":");
        operand *table = NULL;
        if (accept(p, ".branchtargets")) {
            operand items[256];
            int count = 0, first = p->nreferences;
            do {
                if (count == 256) fail(p, name.line, "more than 256 branch targets");
                refer_to_label(p, &items[count++], expect_word(p, "a label"));
            } while (accept(p, ","));
            expect(p, ";");
            table = new_items(p, 1);
            *table =
                (operand){.kind = OP_VECTOR, .reg = -1, .symbol = -1, .count = count, .items = new_items(p, count)};
            memcpy(table->items, items, sizeof *items * count);
            move_references(p, first, items, count, table->items);
        } else if (is(p, ".callprototype") || is(p, ".calltargets")) {
            fail(p, name.line, "calls through a register are not known");
        }
        define_label(p, name, table);
        return;
    }
    if (accept(p, ".reg"))
        reg_declaration(p);
    else if (accept(p, ".shared"))
        body_variable(p, SPACE_SHARED);
    else if (accept(p, ".local"))
        body_variable(p, SPACE_LOCAL);
    else if (accept(p, ".param"))
        body_variable(p, SPACE_PARAM);
    else if (accept(p, ".loc"))
        location(p);
    else if (accept(p, ".file"))
        file(p);
    else if (accept(p, ".pragma"))
        skip_past_semicolon(p);
    else
        fail_here(p, "a known directive");
}

static void resolve_labels(parser *p)
{
    for (int r = 0; r < p->nreferences; r++) {
        reference *ref = &p->references[r];
        const label *found = NULL;
        for (int scope = ref->scope; scope >= 0 && !found; scope = p->parent[scope])
            for (int i = 0; i < p->nlabels && !found; i++)
                if (p->labels[i].scope == scope && p->labels[i].length == ref->length &&
                    !memcmp(p->labels[i].name, ref->name, ref->length))
                    found = &p->labels[i];
        if (!found) fail(p, ref->line, "unknown name %.*s", ref->length > 60 ? 60 : (int)ref->length, ref->name);
        if (found->table)
            *ref->o = *found->table;
        else
            ref->o->imm = found->pc;
    }
    p->nreferences = p->nlabels = 0;
}

// Formal parameters and the arguments of calls are in local memory, so their loads and stores are local ones.
static void param_is_local(parser *p, inst *in)
{
    bool load = !strncmp(in->text, "ld.param", 8), store = !strncmp(in->text, "st.param", 8);
    if (!load && !store) return;
    int index = load ? 1 : 0;
    if (in->nops <= index || in->ops[index].kind != OP_BRACKET || in->ops[index].count != 1) return;
    const operand *o = &in->ops[index].items[0];
    if (o->kind != OP_ADDRESS || o->symbol < 0 || p->k->variables[o->symbol].space != SPACE_LOCAL) return;
    const char *rest = in->text + 8;
    if (!strncmp(rest, "::func", 6)) rest += 6;
    char *text = take(p, strlen(rest) + 9);
    sprintf(text, "%.2s.local%s", in->text, rest);
    in->text = text;
    in->mods = 0;
    split_modifiers(p, in);
}

static void function_body(parser *p, kernel *k, body b)
{
    p->k = k;
    p->at = b.text;
    p->line = b.line;
    p->source_file = p->source_line = 0;
    p->scope = -1;
    p->nscopes = 0;
    k->first = p->ninsts;

    // Module variables come first, the parameters move up behind them.
    int own = k->nvariables;
    variable *all = malloc(sizeof *all * (size_t)(p->nglobals + own + 1));
    if (!all) fail(p, b.line, "out of memory");
    if (p->nglobals) memcpy(all, p->globals, sizeof *all * (size_t)p->nglobals);
    if (own) memcpy(all + p->nglobals, k->variables, sizeof *all * (size_t)own);
    free(k->variables);
    k->variables = all;
    k->first_param = p->nglobals;
    k->nvariables = p->room_variables = p->nglobals + own;
    k->shared_bytes = p->module_shared;

    push_scope(p);
    for (int i = k->first_param; i < k->nvariables; i++) {
        token name = {WORD, k->variables[i].name, strlen(k->variables[i].name), b.line};
        declare(p, SYMBOL_VARIABLE, name, i, 1);
    }
    int outer = p->depth;
    advance(p);
    expect(p, "{");
    push_scope(p);
    while (p->depth > outer) {
        if (p->now.kind == END) fail(p, b.line, "'{' without '}'");
        if (is(p, "{")) {
            advance(p);
            push_scope(p);
        } else if (is(p, "}")) {
            pop_scope(p);
            if (p->depth > outer) advance(p);
        } else {
            statement(p);
        }
    }
    // Falling off the end returns.
    inst end = {
        .guard = -1, .text = copy_text(p, "ret", 3), .line = p->now.line, .mod = take(p, 1), .ops = new_items(p, 0)};
    GROW(p->insts, p->ninsts, p->room_insts)[p->ninsts] = end;
    p->ninsts++;
    resolve_labels(p);
    pop_scope(p);
    k->count = p->ninsts - k->first;

    for (int i = k->first; i < p->ninsts; i++) {
        inst *in = &p->insts[i];
        param_is_local(p, in);
        bool unknown = false;
        const char *wrong = decode(in, k, &unknown);
        if (!wrong) continue;
        if (p->unknown)
            fprintf(p->unknown, unknown ? "line %d: %s\n" : "line %d: %s: %s\n", in->line, in->text, wrong);
        else if (unknown)
            fail(p, in->line, "unknown instruction: %s", in->text);
        else
            fail(p, in->line, "%s: %s", in->text, wrong);
    }
}

// ------------------------------------------------------------------------------------------------------ module

static void target(parser *p)
{
    token t = expect_word(p, "a target");
    char name[16] = "";
    if (t.length < sizeof name) memcpy(name, t.text, t.length);
    static const struct {
        const char *name;
        int sm;
        char suffix;
    } known[] = {{"sm_90a", 90, 'a'}, {"sm_90", 90, 0},      {"sm_100a", 100, 'a'}, {"sm_100f", 100, 'f'},
                 {"sm_100", 100, 0},  {"sm_103a", 103, 'a'}, {"sm_103f", 103, 'f'}, {"sm_103", 103, 0}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, name)) {
            p->m->sm = known[i].sm;
            p->m->sm_suffix = known[i].suffix;
        }
    if (!p->m->sm)
        fail(p, t.line, "target %.*s: only sm_90a, sm_100a, sm_100f, sm_103a and sm_103f are known",
             t.length > 40 ? 40 : (int)t.length, t.text);
    while (accept(p, ",")) {
        if (!accept(p, "debug") && !accept(p, "texmode_independent") && !accept(p, "texmode_unified"))
            fail_here(p, "debug");
    }
}

static void version(parser *p)
{
    token t = p->now;
    int major, minor;
    char text[16] = "";
    if (t.kind == NUMBER && t.length < sizeof text) memcpy(text, t.text, t.length);
    if (sscanf(text, "%d.%d", &major, &minor) != 2) fail_here(p, "a version");
    p->m->version = 10 * major + minor;
    if (p->m->version < 80 || p->m->version > 93) fail(p, t.line, "version %s: 8.0 to 9.3 are known", text);
    advance(p);
}

static void module_statement(parser *p)
{
    bool is_extern = false;
    for (;;) {
        if (accept(p, ".extern"))
            is_extern = true;
        else if (!accept(p, ".visible") && !accept(p, ".weak") && !accept(p, ".common"))
            break;
    }
    if (accept(p, ".version"))
        version(p);
    else if (accept(p, ".target"))
        target(p);
    else if (accept(p, ".address_size")) {
        if (integer(p, 0, 64, ".address_size") != 64) fail(p, p->line, ".address_size: 64 is known");
    } else if (accept(p, ".entry"))
        function(p, true);
    else if (accept(p, ".func"))
        function(p, false);
    else if (accept(p, ".global"))
        module_variable(p, SPACE_GLOBAL, is_extern);
    else if (accept(p, ".const"))
        module_variable(p, SPACE_CONST, is_extern);
    else if (accept(p, ".shared"))
        module_variable(p, SPACE_SHARED, is_extern);
    else if (accept(p, ".file"))
        file(p);
    else if (accept(p, ".loc"))
        location(p);
    else if (accept(p, ".pragma"))
        skip_past_semicolon(p);
    else if (accept(p, ".section")) {
        while (p->now.kind == WORD) advance(p); // its name
        if (!is(p, "{")) fail_here(p, "{");
        skip_braces(p);
    } else if (!accept(p, ";")) {
        fail_here(p, "a known directive");
    }
}

// The most local memory that a call of k can take, with the functions below it; a cycle has no bound.
static size_t stack_bytes(parser *p, int index, char *state)
{
    kernel *k = &p->m->kernels[index];
    if (state[index] == 2) return k->local_bytes;
    if (state[index] == 1) fail(p, p->bodies[index].line, "%s calls itself: recursion is not known", k->name);
    state[index] = 1;
    size_t below = 0;
    for (int i = k->first; i < k->first + k->count; i++) {
        const inst *in = &p->insts[i];
        for (int o = 0; o < in->nops; o++) {
            if (in->ops[o].kind != OP_FUNCTION || p->m->kernels[in->ops[o].symbol].first < 0) continue;
            size_t n = stack_bytes(p, in->ops[o].symbol, state);
            if (n > below) below = n;
        }
    }
    state[index] = 2;
    k->frame_bytes = align_up(k->frame_bytes, 16);
    return k->local_bytes = k->frame_bytes + below;
}

static void whole_module(parser *p)
{
    module *m = p->m;
    advance(p);
    while (p->now.kind != END) module_statement(p);
    if (!m->version) fail(p, p->line, ".version is missing");
    if (!m->sm) fail(p, p->line, ".target is missing");

    // Functions: one numbering of registers through all of them, which every entry continues.
    type *types = NULL;
    int regs = 0;
    for (int i = 0; i < m->count; i++) {
        kernel *k = &m->kernels[i];
        if (k->is_entry || !p->bodies[i].text) continue;
        k->reg_type = types;
        k->regs = regs;
        p->room_regs = regs;
        type *own = malloc(sizeof *own * (size_t)(regs + 1));
        if (!own) {
            k->reg_type = NULL;
            fail(p, p->line, "out of memory");
        }
        if (regs) memcpy(own, types, sizeof *own * (size_t)regs);
        k->reg_type = own;
        function_body(p, k, p->bodies[i]);
        types = k->reg_type;
        regs = k->regs;
    }
    for (int i = 0; i < m->count; i++) {
        kernel *k = &m->kernels[i];
        if (!k->is_entry) continue;
        if (!p->bodies[i].text) fail(p, p->line, "%s has no body", k->name);
        k->reg_type = malloc(sizeof *k->reg_type * (size_t)(regs + 1));
        if (!k->reg_type) fail(p, p->line, "out of memory");
        if (regs) memcpy(k->reg_type, types, sizeof *types * (size_t)regs);
        k->regs = p->room_regs = regs;
        function_body(p, k, p->bodies[i]);
    }
    char *state = take(p, (size_t)m->count + 1);
    for (int i = 0; i < m->count; i++)
        if (p->bodies[i].text) stack_bytes(p, i, state);
}

void module_free(module *m)
{
    if (!m) return;
    for (int i = 0; i < m->nglobals; i++) {
        if (!m->globals[i].initial) continue;
        if (m->globals[i].offset) ptxsim_unregister(m->globals[i].offset);
        free((unsigned char *)m->globals[i].initial);
    }
    free(m->globals);
    for (int i = 0; i < m->count; i++) {
        free(m->kernels[i].variables);
        free(m->kernels[i].reg_type);
    }
    free(m->kernels);
    free(m->insts);
    free(m->files);
    arena_free(m->memory);
    free(m);
}

static bool parse_whole(parser *p)
{
    if (setjmp(p->failed)) return false;
    whole_module(p);
    return true;
}

module *module_parse(const char *text, char *error, size_t error_size, FILE *unknown)
{
    if (error_size) *error = 0;
    parser *p = calloc(1, sizeof *p);
    module *m = calloc(1, sizeof *m);
    struct arena *memory = calloc(1, sizeof *memory);
    bool ok = false;
    if (p && m && memory) {
        m->memory = memory;
        *p = (parser){
            .m = m, .at = text, .line = 1, .error = error, .error_size = error_size, .unknown = unknown, .scope = -1};
        ok = parse_whole(p);
        m->globals = p->globals;
        m->nglobals = p->nglobals;
        m->insts = p->insts;
        for (int i = 0; i < m->count; i++) m->kernels[i].insts = p->insts;
        if (ok) wgmma_mark(m);
        free(p->pending.variables);
        free(p->declared);
        free(p->parent);
        free(p->labels);
        free(p->references);
        free(p->bodies);
    } else {
        free(memory);
        snprintf(error, error_size, "out of memory");
    }
    free(p);
    if (ok) return m;
    module_free(m);
    return NULL;
}
