// Sums over per-block partial sums of columns. There can be many blocks, so 32 threads share each
// of a block's few columns.
#pragma once
#include "device.cuh"

// Columns per block: f32 values per memory sector.
constexpr int JOINED = 8;
constexpr int SHARES = 32;

// Sums of warps, each of which has a few shares of all columns.
template <class T>
struct Shares {
    T sums[SHARES * JOINED / LANES][JOINED];
};

// A thread's column, and the first of its partial sums; the others follow at intervals of SHARES.
__device__ inline unsigned joined_column() { return blockIdx.x * JOINED + threadIdx.x % JOINED; }
__device__ inline unsigned own_share() { return threadIdx.x / JOINED; }

// The sum over a column's threads, in a fixed order; returned to all of them.
template <class T>
__device__ inline T join(Shares<T>& shares, T value) {
#pragma unroll
    for (int distance = JOINED; distance < LANES; distance *= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    // Other threads might still be reading the previous sums.
    __syncthreads();
    if (threadIdx.x % LANES < JOINED) {
        shares.sums[threadIdx.x / LANES][threadIdx.x % JOINED] = value;
    }
    __syncthreads();
    T sum = 0;
#pragma unroll
    for (int warp = 0; warp < SHARES * JOINED / LANES; warp++) {
        sum += shares.sums[warp][threadIdx.x % JOINED];
    }
    return sum;
}

// The sum of a column over rows with a pitch of `pitch` elements, one row per partial sum. All
// threads of a block must call this, even if their column does not exist.
template <class T>
__device__ inline T join_parts(const float* partial, unsigned parts, size_t pitch, unsigned column, bool exists, Shares<T>& shares) {
    T sum = 0;
    for (unsigned part = own_share(); part < parts && exists; part += SHARES) {
        sum += partial[part * pitch + column];
    }
    return join(shares, sum);
}
