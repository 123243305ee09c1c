// Gradient norm and its consequences: the factor that removes the loss scale and clips, whether to
// skip the step, and the next step's scale. Everything stays on the device. Sums are in f64: finite
// exactly when all gradients are.
#include "device.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / LANES;
// Loads in flight per thread.
constexpr int DEPTH = 4;
// The smallest normal f16: no smaller scale helps.
constexpr float FLOOR = 6.103515625e-05f;
// PyTorch's clip_grad_norm_ adds it to the norm before dividing by it.
constexpr double CLIP_EPSILON = 1e-6;

// Constant during a training.
struct Rules {
    double most;  // maximum norm for clipping; infinity disables clipping
    float growth, backoff;
    unsigned long long growth_interval;
    unsigned is_dynamic, unused;
};

struct Scaler {
    double norm;  // of the last step, unscaled
    unsigned long long good_steps, skipped_steps, skipped_in_a_row;
    float scale;
    unsigned unused;
};

// partial: the sum of each block.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_of_squares(const float* gradient, double* partial, unsigned count) {
    const size_t vectors = count / 4;
    const size_t stride = (size_t)gridDim.x * THREADS;
    double sums[4] = {};
    for (size_t start = (size_t)blockIdx.x * THREADS + threadIdx.x; start < vectors; start += DEPTH * stride) {
        float values[DEPTH][4];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (start + d * stride < vectors) {
                load(gradient + 4 * (start + d * stride), values[d]);
            } else {
                unpack<float>(make_uint4(0, 0, 0, 0), values[d]);
            }
        }
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[i] += (double)values[d][i] * values[d][i];
            }
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < count % 4) {
        const double last = gradient[4 * vectors + threadIdx.x];
        sums[0] += last * last;
    }
    const double sum = block_sum<WARPS>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
    }
}

// A single block. mean: the factor times the sum of the row losses, in a fixed order; add: whether
// to add to it.
extern "C" __global__ void __launch_bounds__(THREADS)
    mean_loss(const float* losses, const float* factor, float* mean, unsigned count, unsigned add) {
    double thread_sum = 0.0;
    for (unsigned row = threadIdx.x; row < count; row += THREADS) {
        thread_sum += losses[row];
    }
    const double sum = block_sum<WARPS>(thread_sum);
    if (threadIdx.x == 0) {
        const float part = (float)(sum * *factor);
        *mean = add != 0 ? *mean + part : part;
    }
}

// A single block. loss: of this step. candidates: the optimizer's parameters (`words` 32-bit words
// each) for the case that the previous step was applied, and for the case that it was skipped; the
// host writes both because it does not know which. One of them is copied to numbers.
extern "C" __global__ void __launch_bounds__(THREADS)
    scaler(const double* partial, const float* loss, const Rules* rules, Scaler* state, Scaling* scaling,
           const unsigned* candidates, unsigned* numbers, unsigned words, unsigned parts) {
    const unsigned first = state->skipped_in_a_row == 0 ? 0 : words;
    for (unsigned word = threadIdx.x; word < words; word += THREADS) {
        numbers[word] = candidates[first + word];
    }
    double thread_sum = 0.0;
    for (unsigned part = threadIdx.x; part < parts; part += THREADS) {
        thread_sum += partial[part];
    }
    const double squares = block_sum<WARPS>(thread_sum);
    if (threadIdx.x != 0) {
        return;
    }
    const Rules r = *rules;
    Scaler s = *state;
    s.norm = sqrt(squares) / s.scale;
    const double clip = r.most / (s.norm + CLIP_EPSILON);
    scaling->gradient_scale = (float)((clip < 1.0 ? clip : 1.0) / s.scale);
    // False for NaN and infinity.
    const bool is_finite = s.norm <= 1.7976931348623157e308 && fabsf(*loss) <= 3.402823466e+38f;
    scaling->skip = is_finite ? 0 : 1;
    s.skipped_in_a_row = is_finite ? 0 : s.skipped_in_a_row + 1;
    s.skipped_steps += is_finite ? 0 : 1;
    if (r.is_dynamic != 0) {
        s.good_steps = is_finite ? s.good_steps + 1 : 0;
        if (!is_finite) {
            s.scale = fmaxf(s.scale * r.backoff, FLOOR);
        } else if (s.good_steps >= r.growth_interval) {
            s.good_steps = 0;
            const float grown = s.scale * r.growth;
            s.scale = grown <= 3.402823466e+38f ? grown : s.scale;
        }
    }
    *state = s;
}
