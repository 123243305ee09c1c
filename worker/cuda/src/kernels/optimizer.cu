// An optimizer step over all parameters: unscaled gradient, state, weight decay, and a copy of the
// weight in COPY. Compiled without fused multiply-add contraction; every operation is rounded as on
// the CPU, in the order of the engine's rule, so the results are bit-identical. LAMB and LARS have
// a ratio per parameter, which depends on two norms: three kernels in sequence.
#include "device.cuh"

// ADAM covers Adam, whose decay is added to the gradient, and AdamW, which scales the weight.
enum Rule { SGD, ADAM, LAMB, LARS };

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / LANES;
// Smaller state is flushed to zero as on the CPU, where denormals are slow.
constexpr float TINY = 1e-30f;

// Per-step values. In device memory, so that a captured launch reads the values of its step.
struct Numbers {
    double learning_rate, weight_decay, trust;
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float step_size, root, epsilon;
    float keep, decay;
    float momentum, rate;
    unsigned nesterov;
};

// Consecutive elements of one parameter, starting at a multiple of 8.
struct Chunk {
    unsigned begin, count, decays, parameter;
};

// Values that are constant within a chunk.
struct Own {
    float scale, decay, keep, rate;
};

__device__ inline Own own(const Numbers& n, const Chunk& chunk, float scale, const double* ratios) {
    Own params = {scale, chunk.decays != 0 ? n.decay : 0.0f, chunk.decays != 0 ? n.keep : 1.0f, n.rate};
    if constexpr (RULE == LAMB) {
        params.rate = (float)(n.learning_rate * ratios[chunk.parameter]);
    } else if constexpr (RULE == LARS) {
        const double rate = n.learning_rate * ratios[chunk.parameter];
        params.scale = (float)((double)scale * rate);
        params.decay = chunk.decays != 0 ? (float)(n.weight_decay * rate) : 0.0f;
    }
    return params;
}

__device__ inline float flush(float value) { return fabsf(value) < TINY ? 0.0f : value; }

__device__ inline void moments(float& first, float& second, float gradient, const Numbers& n) {
    first = flush(first * n.beta1 + gradient * n.one_minus_beta1);
    second = flush(second * n.beta2 + gradient * gradient * n.one_minus_beta2);
}

__device__ inline float quotient(float first, float second, const Numbers& n) {
    return first / (sqrtf(second) / n.root + n.epsilon);
}

// LAMB's update before the trust ratio.
__device__ inline float direction(float weight, float first, float second, float decay, const Numbers& n) {
    return n.step_size * quotient(first, second, n) + weight * decay;
}

__device__ inline void update(float& weight, float& first, float& second, float gradient, bool has_momentum, const Numbers& n,
                              const Own& params) {
    if constexpr (RULE == ADAM) {
        moments(first, second, gradient * params.scale + weight * params.decay, n);
        weight = weight * params.keep - n.step_size * quotient(first, second, n);
    } else if constexpr (RULE == LAMB) {
        weight -= params.rate * direction(weight, first, second, params.decay, n);
    } else {
        float step = gradient * params.scale + weight * params.decay;
        if (has_momentum) {
            first = flush(first * n.momentum + step);
            step = n.nesterov != 0 ? step + first * n.momentum : first;
        }
        weight -= params.rate * step;
    }
}

// first is null without momentum, second where the rule has none, copy where COPY is float; ratios
// are for LAMB and LARS.
extern "C" __global__ void __launch_bounds__(THREADS)
    optimizer_step(float* weight, float* first, float* second, const float* gradient, COPY* copy, const Chunk* chunks,
                   const Numbers* numbers, const Scaling* scaling, const double* ratios, unsigned chunk_count) {
    if (scaling->skip != 0) {
        return;
    }
    constexpr bool READS_GRADIENT = RULE != LAMB, HAS_SECOND = RULE == ADAM || RULE == LAMB;
    constexpr bool WRITES_STATE = RULE != LAMB, HAS_COPY = sizeof(COPY) != sizeof(float);
    const Numbers n = *numbers;
    const float scale = scaling->gradient_scale;
    const bool has_first = HAS_SECOND || first != nullptr;
    for (unsigned c = blockIdx.x; c < chunk_count; c += gridDim.x) {
        const Chunk chunk = chunks[c];
        const Own params = own(n, chunk, scale, ratios);
        const size_t begin = chunk.begin;
        const unsigned whole = chunk.count / 4 * 4;
        for (unsigned i = threadIdx.x * 4; i < whole; i += THREADS * 4) {
            const size_t at = begin + i;
            float w[4], m[4] = {}, v[4] = {}, g[4] = {};
            load(weight + at, w);
            if (has_first) {
                load(first + at, m);
            }
            if constexpr (HAS_SECOND) {
                load(second + at, v);
            }
            if constexpr (READS_GRADIENT) {
                load(gradient + at, g);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                update(w[k], m[k], v[k], g[k], has_first, n, params);
            }
            store(w, weight + at);
            if (WRITES_STATE && has_first) {
                store(m, first + at);
            }
            if constexpr (WRITES_STATE && HAS_SECOND) {
                store(v, second + at);
            }
            if constexpr (HAS_COPY) {
                store_four(w, copy + at);
            }
        }
        for (unsigned i = whole + threadIdx.x; i < chunk.count; i += THREADS) {
            const size_t at = begin + i;
            float w = weight[at], m = has_first ? first[at] : 0.0f, v = HAS_SECOND ? second[at] : 0.0f;
            update(w, m, v, READS_GRADIENT ? gradient[at] : 0.0f, has_first, n, params);
            weight[at] = w;
            if (WRITES_STATE && has_first) {
                first[at] = m;
            }
            if constexpr (WRITES_STATE && HAS_SECOND) {
                second[at] = v;
            }
            if constexpr (HAS_COPY) {
                narrow(w, copy + at);
            }
        }
    }
}

// For each chunk, the sums of squares of the weights and of their counterpart: LAMB's direction,
// whose moments this kernel updates, or LARS's gradient, which is still scaled.
extern "C" __global__ void __launch_bounds__(THREADS)
    optimizer_norms(const float* weight, float* first, float* second, const float* gradient, const Chunk* chunks,
                    const Numbers* numbers, const Scaling* scaling, double2* squares, unsigned chunk_count) {
    if (scaling->skip != 0) {
        return;
    }
    const Numbers n = *numbers;
    const float scale = scaling->gradient_scale;
    for (unsigned c = blockIdx.x; c < chunk_count; c += gridDim.x) {
        const Chunk chunk = chunks[c];
        const float decay = chunk.decays != 0 ? n.decay : 0.0f;
        const size_t begin = chunk.begin;
        const unsigned whole = chunk.count / 4 * 4;
        double sums[2] = {};
        const auto add = [&](float weight, float& first, float& second, float gradient) {
            if constexpr (RULE == LAMB) {
                moments(first, second, gradient * scale, n);
                gradient = direction(weight, first, second, decay, n);
            }
            sums[0] += (double)weight * weight;
            sums[1] += (double)gradient * gradient;
        };
        for (unsigned i = threadIdx.x * 4; i < whole; i += THREADS * 4) {
            const size_t at = begin + i;
            float w[4], m[4] = {}, v[4] = {}, g[4];
            load(weight + at, w);
            load(gradient + at, g);
            if constexpr (RULE == LAMB) {
                load(first + at, m);
                load(second + at, v);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                add(w[k], m[k], v[k], g[k]);
            }
            if constexpr (RULE == LAMB) {
                store(m, first + at);
                store(v, second + at);
            }
        }
        for (unsigned i = whole + threadIdx.x; i < chunk.count; i += THREADS) {
            const size_t at = begin + i;
            float m = 0.0f, v = 0.0f;
            if constexpr (RULE == LAMB) {
                m = first[at];
                v = second[at];
            }
            add(weight[at], m, v, gradient[at]);
            if constexpr (RULE == LAMB) {
                first[at] = m;
                second[at] = v;
            }
        }
        const double of_weights = block_sum<WARPS>(sums[0]);
        __syncthreads();
        const double of_others = block_sum<WARPS>(sums[1]);
        __syncthreads();
        if (threadIdx.x == 0) {
            squares[c] = make_double2(of_weights, of_others);
        }
    }
}

// The ratio of each parameter, from the sums of its chunks in order. It is 1 for parameters without
// weight decay, and for those whose weights or updates are all zero, which would otherwise never
// change.
extern "C" __global__ void __launch_bounds__(THREADS)
    optimizer_ratios(const Chunk* chunks, const double2* squares, const Numbers* numbers, const Scaling* scaling,
                     double* ratios, unsigned chunk_count) {
    const unsigned c = blockIdx.x * THREADS + threadIdx.x;
    if (scaling->skip != 0 || c >= chunk_count) {
        return;
    }
    const Chunk chunk = chunks[c];
    if (c > 0 && chunks[c - 1].parameter == chunk.parameter) {
        return;
    }
    double sums[2] = {};
    for (unsigned at = c; at < chunk_count && chunks[at].parameter == chunk.parameter; at++) {
        const double2 both = squares[at];
        sums[0] += both.x;
        sums[1] += both.y;
    }
    const double weights = sqrt(sums[0]);
    double others = sqrt(sums[1]), ratio = 1.0;
    if constexpr (RULE == LARS) {
        others *= (double)scaling->gradient_scale;
    }
    if (chunk.decays != 0 && weights > 0.0 && others > 0.0) {
        ratio = RULE == LARS ? numbers->trust * weights / (others + numbers->weight_decay * weights) : weights / others;
    }
    ratios[chunk.parameter] = ratio;
}
