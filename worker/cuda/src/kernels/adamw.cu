// One pass of AdamW over all parameters: unscaled gradient, moments, weight decay, and a copy of the weight in COPY, a type of 16 bits.
// Compiled without contraction to fused multiply-adds; every operation is rounded as on the CPU, in the order of the
// engine's rule, so the bits are the same.
#include "device.cuh"

// Moments smaller than this become zero, as on the CPU, where subnormal numbers are slow.
constexpr float TINY = 1e-30f;

// What changes from step to step. It lies on the device, so that a captured launch sees the numbers of its step.
struct Numbers {
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float step_size;  // learning rate / (1 - beta1^t)
    float root;       // root of (1 - beta2^t)
    float epsilon;
    float keep;  // 1 - learning rate * weight decay
};

// Consecutive numbers of one parameter, from a multiple of 8 on.
struct Chunk {
    unsigned begin, count, decays, unused;
};

__device__ inline float flush(float value) { return fabsf(value) < TINY ? 0.0f : value; }

__device__ inline void update(float& weight, float& first, float& second, float gradient, const Numbers& n,
                              float keep) {
    first = flush(first * n.beta1 + gradient * n.one_minus_beta1);
    second = flush(second * n.beta2 + gradient * gradient * n.one_minus_beta2);
    weight = weight * keep - n.step_size * (first / (sqrtf(second) / n.root + n.epsilon));
}

extern "C" __global__ void __launch_bounds__(256)
    adamw(float* weight, float* first, float* second, const float* gradient, COPY* copy, const Chunk* chunks,
          const Numbers* numbers, const Scaling* scaling, unsigned chunk_count) {
    if (scaling->skip != 0) {
        return;
    }
    const Numbers n = *numbers;
    const float scale = scaling->gradient_scale;
    for (unsigned c = blockIdx.x; c < chunk_count; c += gridDim.x) {
        const Chunk chunk = chunks[c];
        const float keep = chunk.decays != 0 ? n.keep : 1.0f;
        const size_t begin = chunk.begin;
        const unsigned whole = chunk.count / 4 * 4;
        for (unsigned i = threadIdx.x * 4; i < whole; i += blockDim.x * 4) {
            const size_t at = begin + i;
            float w[4], m[4], v[4], g[4];
            load(weight + at, w);
            load(first + at, m);
            load(second + at, v);
            load(gradient + at, g);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                update(w[k], m[k], v[k], g[k] * scale, n, keep);
            }
            store(w, weight + at);
            store(m, first + at);
            store(v, second + at);
            store_four(w, copy + at);
        }
        for (unsigned i = whole + threadIdx.x; i < chunk.count; i += blockDim.x) {
            const size_t at = begin + i;
            float w = weight[at], m = first[at], v = second[at];
            update(w, m, v, gradient[at] * scale, n, keep);
            weight[at] = w;
            first[at] = m;
            second[at] = v;
            narrow(w, copy + at);
        }
    }
}
