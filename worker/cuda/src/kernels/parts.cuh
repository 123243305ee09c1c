// Sums over the parts that blocks have written of columns. Many blocks leave many parts, so a block has 32 threads for each of a few columns.
#pragma once
#include "device.cuh"

// Columns of a block: numbers of 32 bits in a sector of memory.
constexpr int JOINED = 8;
constexpr int SHARES = 32;

// Sums of warps, each of which has a few shares of all columns.
template <class T>
struct Shares {
    T sums[SHARES * JOINED / LANES][JOINED];
};

// The column of a thread, and which of its parts it has: this one, and each SHARES further on.
__device__ inline unsigned joined_column() { return blockIdx.x * JOINED + threadIdx.x % JOINED; }
__device__ inline unsigned own_share() { return threadIdx.x / JOINED; }

// The sum over the threads of a column, in the same order every time; all of them get it.
template <class T>
__device__ inline T join(Shares<T>& shares, T own) {
#pragma unroll
    for (int distance = JOINED; distance < LANES; distance *= 2) {
        own += __shfl_xor_sync(ALL_LANES, own, distance);
    }
    // Others may still read the sums before.
    __syncthreads();
    if (threadIdx.x % LANES < JOINED) {
        shares.sums[threadIdx.x / LANES][threadIdx.x % JOINED] = own;
    }
    __syncthreads();
    T sum = 0;
#pragma unroll
    for (int warp = 0; warp < SHARES * JOINED / LANES; warp++) {
        sum += shares.sums[warp][threadIdx.x % JOINED];
    }
    return sum;
}

// The sum of a column over rows that are `pitch` numbers apart, one of each part. All threads of a block come here, also those whose column does not
// exist.
template <class T>
__device__ inline T join_parts(const float* partial, unsigned parts, size_t pitch, unsigned column, bool exists, Shares<T>& shares) {
    T sum = 0;
    for (unsigned part = own_share(); part < parts && exists; part += SHARES) {
        sum += partial[part * pitch + column];
    }
    return join(shares, sum);
}
