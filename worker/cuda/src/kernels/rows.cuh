// Access to rows of WIDTH elements of type ELEMENT with pitch PITCH, a multiple of 16 bytes. The
// padding is never accessed.
#pragma once
#include "device.cuh"

constexpr int N = PER_VECTOR<ELEMENT>;

// Reads a thread's part of a row; zeros beyond its end.
template <class T, int COUNT>
__device__ inline void read(const T* from, int at, float (&to)[COUNT]) {
    constexpr int AT_ONCE = PER_VECTOR<T>;
    if (at + COUNT <= WIDTH) {
#pragma unroll
        for (int part = 0; part < COUNT; part += AT_ONCE) {
            float values[AT_ONCE];
            load(from + at + part, values);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                to[part + i] = values[i];
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            to[i] = at + i < WIDTH ? widen(from[at + i]) : 0.0f;
        }
    }
}

__device__ inline void write(const float (&from)[N], ELEMENT* to, int at) {
    if (at + N <= WIDTH) {
        store(from, to + at);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (at + i < WIDTH) {
                narrow(from[i], to + at + i);
            }
        }
    }
}
