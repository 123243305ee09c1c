// Blocks whose threads keep to the same columns of rows in all their rows: what belongs to a column is read once by a block, and sums over
// rows need no atomics.
#pragma once
#include "rows.cuh"

constexpr int THREADS = 256;
constexpr int VECTORS = (WIDTH + N - 1) / N;
// Threads of a row: a power of two, so that narrow rows share a warp.
__device__ constexpr int across(int threads) { return threads < LANES && threads < VECTORS ? across(2 * threads) : threads; }
constexpr int ROW_THREADS = across(1);
constexpr int ROWS_AT_ONCE = THREADS / ROW_THREADS;
// Columns of a block.
constexpr int TILE = ROW_THREADS * N;
constexpr int TILES = (WIDTH + TILE - 1) / TILE;

// Numbers of columns, four by four; the second four of a thread lie on other banks than the first.
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

// What the threads of a row keep of column `at` of the block.
__device__ inline float column_of(const Columns& from, int row, int at) {
    return reinterpret_cast<const float*>(&from.fours[at % N / 4][row * ROW_THREADS + at / N])[at % 4];
}

// What stands in the place of the block's first row.
__device__ inline void first_row(const Columns& from, int place, float (&to)[N]) {
#pragma unroll
    for (int part = 0; part < N / 4; part++) {
        const float4 four = from.fours[part][place];
        to[4 * part] = four.x;
        to[4 * part + 1] = four.y;
        to[4 * part + 2] = four.z;
        to[4 * part + 3] = four.w;
    }
}

// Gives every thread what belongs to its columns of numbers that are the same for all rows. `first`: column of the block.
__device__ inline void of_columns(const float* from, int first, int place, Columns& held, float (&to)[N]) {
    // Others may still read what was held.
    __syncthreads();
    const int four = threadIdx.x;
    if (four < TILE / 4) {
        float part[4];
        read(from, first + 4 * four, part);
        held.fours[four % (N / 4)][four / (N / 4)] = make_float4(part[0], part[1], part[2], part[3]);
    }
    __syncthreads();
    first_row(held, place, to);
}
