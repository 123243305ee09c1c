// Bias and activation after a GEMM, on rows of WIDTH elements of type ELEMENT with pitch PITCH.
// Backward works in place on the gradient and also computes the column sums that are the bias
// gradient. A thread keeps to the same columns in all its rows.
#include "columns.cuh"
#include "parts.cuh"

enum Function { NONE, RELU, GELU, TANH };

// GELU, tanh approximation: x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float TWICE = 1.5957692f;  // 2 sqrt(2 / pi)
constexpr float CUBIC = 0.044715f;

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ inline float sigmoid_of_2u(float x) { return sigmoid(x * (TWICE + TWICE * CUBIC * (x * x))); }

__device__ inline float value(float x) {
    if constexpr (FUNCTION == RELU) {
        // NaN stays NaN.
        return x < 0.0f ? 0.0f : x;
    } else if constexpr (FUNCTION == GELU) {
        return x * sigmoid_of_2u(x);
    } else if constexpr (FUNCTION == TANH) {
        // Not tanhf: with fast math it compiles to an instruction that is accurate to only 11 bits.
        return 2.0f * sigmoid(2.0f * x) - 1.0f;
    } else {
        return x;
    }
}

// The gradient before the function. kept: saved by forward, the input (GELU) or the output.
__device__ inline float gradient(float kept, float dy) {
    if constexpr (FUNCTION == RELU) {
        // A select, not a product: infinity times 0 would be NaN.
        return kept <= 0.0f ? 0.0f : dy;
    } else if constexpr (FUNCTION == GELU) {
        const float s = sigmoid_of_2u(kept);
        const float slope = TWICE + 3.0f * TWICE * CUBIC * (kept * kept);
        return dy * (s + kept * s * (1.0f - s) * slope);
    } else if constexpr (FUNCTION == TANH) {
        return dy * (1.0f - kept * kept);
    } else {
        return dy;
    }
}

// y = function(x + bias); kept receives x + bias. bias and kept are optional; y and kept can be x.
extern "C" __global__ void __launch_bounds__(THREADS)
    activation(const ELEMENT* x, const float* bias, ELEMENT* kept, ELEMENT* y, unsigned rows) {
    __shared__ Columns held;
    const int row_thread = threadIdx.x % ROW_THREADS, thread_row = threadIdx.x / ROW_THREADS;
    const int first = blockIdx.x % TILES * TILE, column = first + row_thread * N;
    float shift[N] = {};
    if (bias != nullptr) {
        of_columns(bias, first, row_thread, held, shift);
    }
    const unsigned stride = gridDim.x / TILES * ROWS_AT_ONCE;
    for (unsigned row = blockIdx.x / TILES * ROWS_AT_ONCE + thread_row; row < rows; row += stride) {
        const size_t start = (size_t)row * PITCH;
        float values[N];
        read(x + start, column, values);
#pragma unroll
        for (int i = 0; i < N; i++) {
            values[i] += shift[i];
        }
        if (kept != nullptr) {
            write(values, kept + start, column);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            values[i] = value(values[i]);
        }
        write(values, y + start, column);
    }
}

// dy becomes the gradient before the function. partial: column sums of each block that shares the
// columns, WIDTH values per block; optional.
extern "C" __global__ void __launch_bounds__(THREADS)
    activation_backward(const ELEMENT* kept, ELEMENT* dy, float* partial, unsigned rows) {
    __shared__ Columns held;
    const int row_thread = threadIdx.x % ROW_THREADS, thread_row = threadIdx.x / ROW_THREADS;
    const int first = blockIdx.x % TILES * TILE, column = first + row_thread * N;
    const unsigned part = blockIdx.x / TILES, stride = gridDim.x / TILES * ROWS_AT_ONCE;
    float sums[N] = {};
    for (unsigned row = part * ROWS_AT_ONCE + thread_row; row < rows; row += stride) {
        const size_t start = (size_t)row * PITCH;
        float values[N], before[N] = {};
        read(dy + start, column, values);
        if constexpr (FUNCTION != NONE) {
            read(kept + start, column, before);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            values[i] = gradient(before[i], values[i]);
            sums[i] += values[i];
        }
        if constexpr (FUNCTION != NONE) {
            write(values, dy + start, column);
        }
    }
    if (partial == nullptr) {
        return;
    }
    keep(sums, held);
    __syncthreads();
    // Add the threads of one row after those of another, so the order of the sum is fixed.
    if (threadIdx.x < TILE) {
        const int at = threadIdx.x;
        float sum = 0.0f;
        for (int row = 0; row < ROWS_AT_ONCE; row++) {
            sum += column_of(held, row, at);
        }
        if (first + at < WIDTH) {
            partial[(size_t)part * WIDTH + first + at] = sum;
        }
    }
}

// Sums the partial sums of all blocks in a fixed order. add: whether to add to the gradient.
extern "C" __global__ void __launch_bounds__(THREADS)
    activation_bias(const float* partial, float* d_bias, unsigned parts, unsigned add) {
    __shared__ Shares<float> shares;
    const unsigned i = joined_column();
    const bool exists = i < WIDTH;
    const float sum = join_parts(partial, parts, WIDTH, i, exists, shares);
    if (own_share() == 0 && exists) {
        d_bias[i] = add != 0 ? d_bias[i] + sum : sum;
    }
}
