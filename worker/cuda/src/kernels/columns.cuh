// Blocks whose threads keep to the same columns in all their rows: a block reads per-column values
// once, and sums over rows need no atomics.
#pragma once
#include "rows.cuh"

constexpr int THREADS = 256;
constexpr int VECTORS = (WIDTH + N - 1) / N;
// Threads per row: a power of two, so that narrow rows share a warp.
__device__ constexpr int across(int threads) { return threads < LANES && threads < VECTORS ? across(2 * threads) : threads; }
constexpr int ROW_THREADS = across(1);
constexpr int ROWS_AT_ONCE = THREADS / ROW_THREADS;
// Columns per block.
constexpr int TILE = ROW_THREADS * N;
constexpr int TILES = (WIDTH + TILE - 1) / TILE;

// Per-column values, in groups of four; a thread's second group is in different banks from its
// first.
struct Columns {
    float4 fours[N / 4][THREADS + LANES / 8];
};

__device__ inline void keep(const float (&from)[N], Columns& to) {
#pragma unroll
    for (int part = 0; part < N / 4; part++) {
        to.fours[part][threadIdx.x] =
            make_float4(from[4 * part], from[4 * part + 1], from[4 * part + 2], from[4 * part + 3]);
    }
}

// The value that the threads of a row hold for column `at` of the block.
__device__ inline float column_of(const Columns& from, int row, int at) {
    return reinterpret_cast<const float*>(&from.fours[at % N / 4][row * ROW_THREADS + at / N])[at % 4];
}

// The values held for the block's first row.
__device__ inline void first_row(const Columns& from, int row_thread, float (&to)[N]) {
#pragma unroll
    for (int part = 0; part < N / 4; part++) {
        const float4 four = from.fours[part][row_thread];
        to[4 * part] = four.x;
        to[4 * part + 1] = four.y;
        to[4 * part + 2] = four.z;
        to[4 * part + 3] = four.w;
    }
}

// Gives every thread the values for its columns from an array that is the same for all rows.
// `first`: the block's first column.
__device__ inline void of_columns(const float* from, int first, int row_thread, Columns& held, float (&to)[N]) {
    // Other threads might still be reading the previous values.
    __syncthreads();
    const int four = threadIdx.x;
    if (four < TILE / 4) {
        float part[4];
        read(from, first + 4 * four, part);
        held.fours[four % (N / 4)][four / (N / 4)] = make_float4(part[0], part[1], part[2], part[3]);
    }
    __syncthreads();
    first_row(held, row_thread, to);
}
