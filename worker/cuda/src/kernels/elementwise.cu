// Elementwise operations from FROM to TO: conversion with a factor, sums, and fills. Every
// operation is rounded as on a CPU.
#include "device.cuh"

constexpr int THREADS = 256;
// Elements that a thread processes at once: contiguous accesses in both types.
constexpr int AT_ONCE = PER_VECTOR<FROM> < PER_VECTOR<TO> ? PER_VECTOR<FROM> : PER_VECTOR<TO>;

template <class T>
__device__ inline void read(const T* from, float (&to)[AT_ONCE]) {
    if constexpr (AT_ONCE == PER_VECTOR<T>) {
        load(from, to);
    } else {
        load_four(from, to);
    }
}

template <class T>
__device__ inline void write(const float (&from)[AT_ONCE], T* to) {
    if constexpr (AT_ONCE == PER_VECTOR<T>) {
        store(from, to);
    } else {
        store_four(from, to);
    }
}

// Calls `vector` with the start of each vector, and `single` with each element after the last
// vector.
template <class Vector, class Single>
__device__ inline void each(unsigned count, Vector vector, Single single) {
    const size_t vectors = count / AT_ONCE;
    for (size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x; at < vectors; at += (size_t)gridDim.x * THREADS) {
        vector(at * AT_ONCE);
    }
    if (blockIdx.x == 0 && threadIdx.x < count % AT_ONCE) {
        single(vectors * AT_ONCE + threadIdx.x);
    }
}

// y = x * scale, or y + x * scale.
extern "C" __global__ void __launch_bounds__(THREADS)
    convert(const FROM* x, TO* y, float scale, unsigned count, unsigned add) {
    const auto vector = [=](size_t at) {
        float values[AT_ONCE], old[AT_ONCE] = {};
        read(x + at, values);
        if (add != 0) {
            read(y + at, old);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            values[i] *= scale;
            values[i] = add != 0 ? old[i] + values[i] : values[i];
        }
        write(values, y + at);
    };
    const auto single = [=](size_t at) {
        const float value = widen(x[at]) * scale;
        narrow(add != 0 ? widen(y[at]) + value : value, y + at);
    };
    each(count, vector, single);
}

// y = a + b; y can be a or b if the types are equal.
extern "C" __global__ void __launch_bounds__(THREADS) sum(const FROM* a, const FROM* b, TO* y, unsigned count) {
    const auto vector = [=](size_t at) {
        float values[AT_ONCE], other[AT_ONCE];
        read(a + at, values);
        read(b + at, other);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            values[i] += other[i];
        }
        write(values, y + at);
    };
    each(count, vector, [=](size_t at) { narrow(widen(a[at]) + widen(b[at]), y + at); });
}

extern "C" __global__ void __launch_bounds__(THREADS) fill(TO* y, float value, unsigned count) {
    const auto vector = [=](size_t at) {
        float values[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            values[i] = value;
        }
        write(values, y + at);
    };
    each(count, vector, [=](size_t at) { narrow(value, y + at); });
}
