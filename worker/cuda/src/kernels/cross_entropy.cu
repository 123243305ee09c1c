// Softmax cross entropy of rows of WIDTH logits of type ELEMENT with pitch PITCH (a multiple of 16
// bytes): loss, correct predictions, and the gradient, which overwrites the logits. A block keeps
// as much of its row as fits in its shared memory; that part is read once.
#include "device.cuh"

constexpr int N = PER_VECTOR<ELEMENT>;
constexpr int VECTORS = (WIDTH + N - 1) / N;
constexpr int THREADS = 512;
constexpr int WARPS = THREADS / LANES;
// Loads in flight per thread.
constexpr int DEPTH = 4;
constexpr unsigned IGNORE = 0xffffffff;
constexpr float LOG2_E = 1.44269504088896341f;
// Stands for a missing logit; finite even after multiplication by LOG2_E.
constexpr float LOWEST = -2.3e38f;

// Summary of some logits of a row: the largest, its first column, the sum of exp(x - largest), and
// the plain sum, which only smoothing needs.
struct alignas(16) Summary {
    float largest;
    unsigned first;
    float scaled;
    float sum;
};

// The largest logit as a base-2 exponent. Rounded only here, because its rounding must be the same
// in every term of a row.
__device__ inline float exponent(float largest) { return __fmul_rn(largest, LOG2_E); }

// exp(value - largest).
__device__ inline float relative(float value, float exponent) { return exp2f(fmaf(value, LOG2_E, -exponent)); }

__device__ inline Summary join(const Summary& a, const Summary& b) {
    Summary both;
    both.largest = fmaxf(a.largest, b.largest);
    const float top = exponent(both.largest);
    both.scaled = a.scaled * exp2f(exponent(a.largest) - top) + b.scaled * exp2f(exponent(b.largest) - top);
    both.sum = a.sum + b.sum;
    both.first = min(a.largest == both.largest ? a.first : IGNORE, b.largest == both.largest ? b.first : IGNORE);
    return both;
}

__device__ inline Summary other(const Summary& own, int distance) {
    Summary from;
    from.largest = __shfl_xor_sync(ALL_LANES, own.largest, distance);
    from.first = __shfl_xor_sync(ALL_LANES, own.first, distance);
    from.scaled = __shfl_xor_sync(ALL_LANES, own.scaled, distance);
    from.sum = __shfl_xor_sync(ALL_LANES, own.sum, distance);
    return from;
}

__device__ inline Summary over_warp(Summary own) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        own = join(own, other(own, distance));
    }
    return own;
}

// Whether the row ends within a vector.
__device__ inline bool is_cut(unsigned vector) { return WIDTH % N != 0 && vector == VECTORS - 1; }

// A vector of a row. Memory beyond the row's end might be uninitialised, so it is replaced by
// zeros.
__device__ inline uint4 part_of(const ELEMENT* row, unsigned vector) {
    if (!is_cut(vector)) {
        return reinterpret_cast<const uint4*>(row)[vector];
    }
    float values[N] = {};
#pragma unroll
    for (int i = 0; i < WIDTH % N; i++) {
        values[i] = widen(row[vector * N + i]);
    }
    return pack<ELEMENT>(values);
}

// Adds a vector. A NaN is never the largest logit, but it is in `scaled` and so reaches loss and
// gradient.
__device__ inline void add(Summary& own, uint4 raw, unsigned vector, bool wants_sum) {
    float values[N];
    unpack<ELEMENT>(raw, values);
    if (is_cut(vector)) {
#pragma unroll
        for (int i = WIDTH % N; i < N; i++) {
            values[i] = LOWEST;
        }
    }
    if (wants_sum) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            own.sum += is_cut(vector) && i >= WIDTH % N ? 0.0f : values[i];
        }
    }
    float largest = values[0];
#pragma unroll
    for (int i = 1; i < N; i++) {
        largest = fmaxf(largest, values[i]);
    }
    if (largest > own.largest) {
        own.scaled *= exp2f(exponent(own.largest) - exponent(largest));
        own.largest = largest;
#pragma unroll
        for (int i = N - 1; i >= 0; i--) {
            own.first = values[i] == largest ? vector * N + i : own.first;
        }
    }
    const float top = exponent(own.largest);
#pragma unroll
    for (int i = 0; i < N; i++) {
        own.scaled += relative(values[i], top);
    }
}

// losses: loss of each row in nats, 0 for ignored ones, NaN if the target is not a column. correct:
// 1 if the first of the largest logits is the target. scale: a single value, the gradient factor;
// if null, the logits are unchanged. held: vectors of the row in shared memory.
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy(ELEMENT* logits, const unsigned* targets, float* losses, float* correct, const float* scale,
                  float smoothing, unsigned rows, unsigned held) {
    extern __shared__ uint4 row_start[];
    __shared__ Summary summaries[WARPS];
    const int lane = threadIdx.x % LANES;
    const int warp = threadIdx.x / LANES;
    const bool is_smoothed = smoothing > 0.0f;
    for (unsigned row = blockIdx.x; row < rows; row += gridDim.x) {
        ELEMENT* const x = logits + (size_t)row * PITCH;
        uint4* const vectors = reinterpret_cast<uint4*>(x);
        const unsigned target = targets[row];
        if (target == IGNORE) {
            for (unsigned v = threadIdx.x; scale != nullptr && v < PITCH / N; v += THREADS) {
                vectors[v] = make_uint4(0, 0, 0, 0);
            }
            if (threadIdx.x == 0) {
                losses[row] = 0.0f;
                correct[row] = 0.0f;
            }
            continue;
        }
        // Read before other threads overwrite it with its gradient: there is a barrier in between.
        float at_target = __uint_as_float(0x7fffffff);
        if (threadIdx.x == 0 && target < WIDTH) {
            at_target = widen(x[target]);
        }
        const Summary none = {LOWEST, IGNORE, 0.0f, 0.0f};
        Summary own = none;
        for (unsigned start = threadIdx.x; start < VECTORS; start += DEPTH * THREADS) {
            uint4 raw[DEPTH];
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                if (start + d * THREADS < VECTORS) {
                    raw[d] = part_of(x, start + d * THREADS);
                }
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const unsigned v = start + d * THREADS;
                if (v < VECTORS) {
                    if (v < held) {
                        row_start[v] = raw[d];
                    }
                    add(own, raw[d], v, is_smoothed);
                }
            }
        }
        own = over_warp(own);
        if (lane == 0) {
            summaries[warp] = own;
        }
        __syncthreads();
        const Summary all = over_warp(lane < WARPS ? summaries[lane] : none);
        if (threadIdx.x == 0) {
            float distance = (1.0f - smoothing) * (all.largest - at_target);
            if (is_smoothed) {
                distance += smoothing * (all.largest - all.sum / WIDTH);
            }
            losses[row] = distance + logf(all.scaled);
            correct[row] = all.first == target && all.scaled == all.scaled ? 1.0f : 0.0f;
        }
        if (scale == nullptr) {
            // The summaries are reused.
            __syncthreads();
            continue;
        }
        const float top = exponent(all.largest);
        const float factor = *scale / all.scaled;
        const float everywhere = *scale * smoothing / WIDTH;
        const float at_class = *scale * (1.0f - smoothing);
        for (unsigned v = threadIdx.x; v < PITCH / N; v += THREADS) {
            float values[N] = {};
            if (v < VECTORS) {
                unpack<ELEMENT>(v < held ? row_start[v] : part_of(x, v), values);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    values[i] = fmaf(relative(values[i], top), factor, -everywhere);
                }
                if (v == target / N) {
#pragma unroll
                    for (int i = 0; i < N; i++) {
                        values[i] -= i == target % N ? at_class : 0.0f;
                    }
                }
                // GEMMs over padded columns must read zeros there.
                if (is_cut(v)) {
#pragma unroll
                    for (int i = WIDTH % N; i < N; i++) {
                        values[i] = 0.0f;
                    }
                }
            }
            vectors[v] = pack<ELEMENT>(values);
        }
        // The summaries and the row are reused.
        __syncthreads();
    }
}
