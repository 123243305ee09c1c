// Shared by all kernels. No NVIDIA headers are included: every type and function used here is a
// compiler builtin.
#pragma once

constexpr int LANES = 32;
constexpr unsigned ALL_LANES = 0xffffffff;

struct bf16 {
    unsigned short bits;
};

struct f16 {
    unsigned short bits;
};

// Elements per 16 bytes, the widest access of a thread.
template <class T>
constexpr int PER_VECTOR = 16 / sizeof(T);

__device__ inline float widen(float value) { return value; }
__device__ inline float widen(bf16 value) { return __uint_as_float((unsigned)value.bits << 16); }
__device__ inline float widen(f16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

// Packs two 16-bit values into a word.
template <class T>
__device__ inline unsigned narrow_pair(float low, float high);

template <>
__device__ inline unsigned narrow_pair<bf16>(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

template <>
__device__ inline unsigned narrow_pair<f16>(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline void narrow(float value, float* to) { *to = value; }

template <class T>
__device__ inline void narrow(float value, T* to) {
    to->bits = (unsigned short)narrow_pair<T>(value, 0.0f);
}

template <class T>
__device__ inline void unpack(uint4 raw, float (&to)[PER_VECTOR<T>]) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(T) == 4) {
            to[i] = __uint_as_float(words[i]);
        } else {
            to[2 * i] = widen(T{(unsigned short)words[i]});
            to[2 * i + 1] = widen(T{(unsigned short)(words[i] >> 16)});
        }
    }
}

template <class T>
__device__ inline uint4 pack(const float (&from)[PER_VECTOR<T>]) {
    if constexpr (sizeof(T) == 4) {
        return make_uint4(__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                          __float_as_uint(from[3]));
    } else {
        return make_uint4(narrow_pair<T>(from[0], from[1]), narrow_pair<T>(from[2], from[3]),
                          narrow_pair<T>(from[4], from[5]), narrow_pair<T>(from[6], from[7]));
    }
}

template <class T>
__device__ inline void load(const T* from, float (&to)[PER_VECTOR<T>]) {
    unpack<T>(*reinterpret_cast<const uint4*>(from), to);
}

template <class T>
__device__ inline void store(const float (&from)[PER_VECTOR<T>], T* to) {
    *reinterpret_cast<uint4*>(to) = pack<T>(from);
}

// Four elements, for kernels that also access four f32 values.
template <class T>
__device__ inline void load_four(const T* from, float (&to)[4]) {
    if constexpr (sizeof(T) == 4) {
        load(from, to);
    } else {
        const uint2 raw = *reinterpret_cast<const uint2*>(from);
        to[0] = widen(T{(unsigned short)raw.x});
        to[1] = widen(T{(unsigned short)(raw.x >> 16)});
        to[2] = widen(T{(unsigned short)raw.y});
        to[3] = widen(T{(unsigned short)(raw.y >> 16)});
    }
}

template <class T>
__device__ inline void store_four(const float (&from)[4], T* to) {
    if constexpr (sizeof(T) == 4) {
        store(from, to);
    } else {
        *reinterpret_cast<uint2*>(to) =
            make_uint2(narrow_pair<T>(from[0], from[1]), narrow_pair<T>(from[2], from[3]));
    }
}

// Sum over a warp, in a fixed order; returned to all lanes.
__device__ inline float warp_sum(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    return value;
}

// Maximum over a warp; returned to all lanes.
__device__ inline float warp_max(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
    }
    return value;
}

// Sum over a block, in a fixed order; returned to all threads. Two calls must be separated by a
// barrier.
template <int WARPS>
__device__ inline double block_sum(double value) {
    __shared__ double parts[WARPS];
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    if (threadIdx.x % LANES == 0) {
        parts[threadIdx.x / LANES] = value;
    }
    __syncthreads();
    double sum = 0.0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        sum += parts[warp];
    }
    return sum;
}

// Written by the scaler for the optimizer: the gradient factor, and whether to skip the step.
struct Scaling {
    float gradient_scale;
    unsigned skip;
};
