"""Small hand-written PTX kernels: a frame around a body, and the pieces that many bodies share.

Every kernel is called k. Its frame declares registers and fills these: tid, warp, lane, rank (in the cluster), cta
(%ctaid.x), smem (the start of dynamic shared memory, 1024-byte aligned); g0, g1, ... the pointers and m0, m1, ... the
tensor maps among its parameters, counted apart.
"""

# The frame's shared memory: mbarriers at smem + 8 i, a word for tcgen05.alloc, then data.
TMEM_WORD = 512
DATA = 1024
SMEM = 65536

POINTER, MAP, U32 = "pointer", "map", "u32"


def kernel(body, params=(), target="sm_100a", threads=128, minnctapersm=True, declare="", version="9.0"):
    """PTX text of the kernel k. params: POINTER, MAP or U32 each; u0, u1, ... are the U32 values."""
    declared, load, counts = [], [], {POINTER: 0, MAP: 0, U32: 0}
    for i, kind in enumerate(params):
        n = counts[kind]
        counts[kind] += 1
        if kind == POINTER:
            declared.append(f".param .u64 k_param_{i}")
            load.append(f".reg .b64 g{n}; ld.param.u64 g{n}, [k_param_{i}]; cvta.to.global.u64 g{n}, g{n};")
        elif kind == MAP:
            declared.append(f".param .align 128 .b8 k_param_{i}[128]")
            load.append(f".reg .b64 m{n}; mov.b64 m{n}, k_param_{i}; cvta.param.u64 m{n}, m{n};")
        else:
            declared.append(f".param .u32 k_param_{i}")
            load.append(f".reg .b32 u{n}; ld.param.u32 u{n}, [k_param_{i}];")
    minimum = "\n.minnctapersm 1" if minnctapersm else ""
    return f"""
.version {version}
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
{declare}
.visible .entry k({", ".join(declared)})
.maxntid {threads}, 1, 1{minimum}
{{
.reg .pred p, q;
.reg .b16 h0, h1;
.reg .b32 tid, warp, lane, rank, cta, smem, tmem, x, y, z, i;
.reg .b32 r<64>;
.reg .b64 a, b, c, d;
mov.u32 tid, %tid.x;
shr.u32 warp, tid, 5;
and.b32 lane, tid, 31;
mov.u32 rank, %cluster_ctarank;
mov.u32 cta, %ctaid.x;
mov.u32 smem, dynamic;
{chr(10).join(load)}
{body}
ret;
}}
"""


def when(condition, body):
    """body for the threads where the condition holds: "tid == 0", "warp < 2", "rank != 0"."""
    left, operator, right = condition.split()
    skip = {"==": "ne", "!=": "eq", "<": "ge", ">=": "lt"}[operator]
    return f"""
{{
.reg .pred skip;
setp.{skip}.u32 skip, {left}, {right};
@skip bra OUT;
{body}
OUT:
}}
"""


def loop(count, body):
    """body for i = 0 .. count - 1."""
    return f"""
{{
.reg .pred more;
mov.u32 i, 0;
LOOP:
{body}
add.u32 i, i, 1;
setp.lt.u32 more, i, {count};
@more bra LOOP;
}}
"""


def wait(barrier, parity, semantics=""):
    """Until the phase of that parity of the mbarrier [barrier] is complete."""
    return f"""
{{
.reg .pred done;
WAIT:
mbarrier.try_wait.parity{semantics}.shared::cta.b64 done, [{barrier}], {parity};
@!done bra WAIT;
}}
"""


def init(*counts, fence="fence.mbarrier_init.release.cluster;"):
    """Thread 0 initialises mbarriers smem, smem + 8, ...; a barrier of the CTA is left to the caller."""
    lines = [f"mbarrier.init.shared::cta.b64 [smem+{8 * i}], {count};" for i, count in enumerate(counts)]
    return when("tid == 0", "\n".join([*lines, fence]))


def store_word(pointer, index, value):
    """pointer[index] = value in global memory, 32 bits."""
    return f"{{ .reg .b64 t; mad.wide.u32 t, {index}, 4, {pointer}; st.global.b32 [t], {value}; }}"


def load_word(register, pointer, index):
    return f"{{ .reg .b64 t; mad.wide.u32 t, {index}, 4, {pointer}; ld.global.b32 {register}, [t]; }}"


def bulk_load(destination, source, size, barrier, space="shared::cluster", more=""):
    opcode = f"cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes{more}"
    return f"{opcode} [{destination}], [{source}], {size}, [{barrier}];"


def expect(barrier, size):
    return f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {size};"


def bulk_store(destination, source, size):
    return f"cp.async.bulk.global.shared::cta.bulk_group [{destination}], [{source}], {size};"


COMMIT = "cp.async.bulk.commit_group;"
CLUSTER_SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
ONES = 0x3F803F80  # two bf16


# -------------------------------------------------------------------------------------------------- tensor cores
# Operands of all ones, so that their layout does not matter: D = 16 everywhere.

MMA_A, MMA_B = DATA, DATA + 4096  # 128 x 16 and 16 x 16 bf16, K-major without swizzle
IDESC = 1 << 4 | 1 << 7 | 1 << 10 | 16 // 8 << 17 | 128 // 16 << 24


def descriptor(register, offset, lbo, sbo, version=1 << 46, swizzle=0):
    """The matrix descriptor of the operand at smem + offset."""
    constant = lbo >> 4 << 16 | sbo >> 4 << 32 | version | swizzle << 61
    return f"""
{{
.reg .b32 t;
add.u32 t, smem, {offset};
and.b32 t, t, 0x3ffff;
shr.u32 t, t, 4;
cvt.u64.u32 {register}, t;
or.b64 {register}, {register}, {constant:#x};
}}
"""


def fill(offset, size, value, threads=128):
    """The threads write size bytes at smem + offset, 16 each in turn; value: a register or number of 32 bits."""
    return f"""
{{
.reg .pred more;
.reg .b32 at, end, v;
mov.b32 v, {value};
shl.b32 at, tid, 4;
FILL:
setp.ge.u32 more, at, {size};
@more bra FILLED;
add.u32 end, at, smem;
st.shared.v4.b32 [end+{offset}], {{v, v, v, v}};
add.u32 at, at, {16 * threads};
bra FILL;
FILLED:
}}
"""


ALLOC = when(
    "warp == 0",
    f"""
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+{TMEM_WORD}], 64;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
""",
)
PUBLISH = f"""
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 tmem, [smem+{TMEM_WORD}];
"""
# The lanes of TMEM that a warp may touch.
MY_LANES = "{ .reg .b32 t; shl.b32 t, warp, 21; add.u32 x, tmem, t; }"
DEALLOC = f"""
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
{when("warp == 0", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 tmem, 64;")}
"""
DESCRIPTORS = descriptor("a", MMA_A, 2048, 128) + descriptor("b", MMA_B, 256, 128)


def mma(d="tmem", accumulate=0, idesc=IDESC, a="a"):
    return f"tcgen05.mma.cta_group::1.kind::f16 [{d}], {a}, b, {idesc}, {accumulate};"


def commit(barrier="smem"):
    return f"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{barrier}];"


def registers(first, count):
    return "{" + ", ".join(f"r{i}" for i in range(first, first + count)) + "}"


def tmem_load(address="x", count=16, first=0):
    return f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {registers(first, count)}, [{address}];"


def tmem_store(address="x", count=16, first=0):
    return f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{address}], {registers(first, count)};"
