// 16-bit products on tensor cores. A warp multiplies 16 x 16 by 16 x 8 elements at once. Of the
// sums, and of every 8 columns of the left operand, lane 4 r + c has columns 2 c and 2 c + 1 in
// rows r and r + 8: rounded sums are already laid out as a left operand.
#pragma once
#include "device.cuh"

// Adds the product to the sums.
template <class T>
__device__ inline void multiply_add(const unsigned (&left)[4], unsigned right_low, unsigned right_high, float (&sums)[4]);

template <>
__device__ inline void multiply_add<bf16>(const unsigned (&left)[4], unsigned right_low, unsigned right_high, float (&sums)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
}

template <>
__device__ inline void multiply_add<f16>(const unsigned (&left)[4], unsigned right_low, unsigned right_high, float (&sums)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
}

// 16 x 16 elements of a tile whose rows have PITCH 16-byte vectors, as four 8 x 8 matrices: upper
// left, lower left, upper right, lower right. This is a left operand. Of a right operand whose
// columns these rows are, 0 and 2 are the upper 8 columns, 1 and 3 the lower ones. An odd PITCH
// lets eight rows use all banks.
template <int PITCH>
__device__ inline void load_matrices(const uint4* tile, unsigned (&to)[4]) {
    const int lane = threadIdx.x % LANES;
    const uint4* const row = tile + lane % 16 * PITCH + lane / 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
}

// The same with each 8 x 8 matrix transposed: a right operand whose rows these are, with 0 and 1
// its left 8 columns, 2 and 3 its right ones.
template <int PITCH>
__device__ inline void load_transposed(const uint4* tile, unsigned (&to)[4]) {
    const int lane = threadIdx.x % LANES;
    const uint4* const row = tile + lane % 16 * PITCH + lane / 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
}
