// What the kernels of all chips do alike, beside instructions.
#ifndef FA4_CUDA_DEVICE_H
#define FA4_CUDA_DEVICE_H

#include "args.h"
#include "ptx.h"

// Keys that exist in a batch.
FA4_DEVICE int len_kv_of(const fa4_fwd_args &args, int batch)
{
    return args.len_kv_of ? max(0, min(args.len_kv_of[batch], args.len_kv)) : args.len_kv;
}

// One warp clears the rows of a V block of BLOCK_KV rows, SLABS slabs of ROW bytes a row, from row on. Their weights
// are 0, but 0 times what lies past a batch's last key may be NaN.
template <int BLOCK_KV, int SLABS, int ROW> FA4_DEVICE void clear_rows(uint32_t v_smem, int row)
{
    const int lane = threadIdx.x % 32, chunks = (BLOCK_KV - row) * ROW / 16;
#pragma unroll 1
    for (int slab = 0; slab < SLABS; slab++)
#pragma unroll 1
        for (int i = lane; i < chunks; i += 32)
            st_shared_v4(v_smem + (slab * BLOCK_KV + row) * ROW + i * 16, 0, 0, 0, 0);
    fence_proxy_async_shared();
    __syncwarp();
}

#endif
