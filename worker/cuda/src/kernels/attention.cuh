// Shared by both attention kernels: heads of size HEAD. A row of qkv holds the queries of all
// heads, then their keys, then their values.
#pragma once
#include "device.cuh"

constexpr float LOG2_OF_E = 1.44269504f, LOG_OF_2 = 0.693147181f;
constexpr unsigned MINUS_INFINITY = 0xff800000;

// All rows of head `column` in a tensor whose rows have `heads` heads.
template <class T>
struct Rows {
    T* start;
    size_t pitch;

    __device__ Rows(T* tensor, size_t first_row, unsigned heads, unsigned column)
        : start(tensor + (first_row * heads + column) * HEAD), pitch((size_t)heads * HEAD) {}

    __device__ T* at(unsigned row) const { return start + row * pitch; }
};

__device__ inline bool sees(unsigned query, unsigned key, unsigned context, unsigned causal) {
    return key < context && (causal == 0 || key <= query);
}
