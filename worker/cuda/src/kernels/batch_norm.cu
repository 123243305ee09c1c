// Batch norm of rows of WIDTH channels of type ELEMENT with pitch PITCH; rows are the pixels of all
// images. The moments of each thread's rows are combined in a fixed order, in f64, from squared
// deviations around each part's mean, so that a large mean does not swallow a small variance (Chan,
// Golub and LeVeque 1979).
#include "columns.cuh"
#include "parts.cuh"

constexpr double EPSILON = 1e-5;
// Stride between per-channel arrays, which are 16-byte aligned.
constexpr int STEP = (WIDTH + 3) / 4 * 4;

// Rows of the threads that are `thread_row` rows from the first row of their block, which is one of
// `parts` for its columns.
__device__ inline unsigned rows_of(unsigned part, unsigned thread_row, unsigned parts, unsigned rows) {
    const unsigned first = part * ROWS_AT_ONCE + thread_row;
    return first < rows ? (rows - first - 1) / (parts * ROWS_AT_ONCE) + 1 : 0;
}

// Rows of a block.
__device__ inline unsigned rows_of(unsigned part, unsigned parts, unsigned rows) {
    // The last rows might not suffice for all threads of their block.
    const unsigned lots = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, missing = lots * ROWS_AT_ONCE - rows;
    return ((lots - part - 1) / parts + 1) * ROWS_AT_ONCE - (part == (lots - 1) % parts ? missing : 0);
}

// partial: for each block with the same columns, each channel's mean, then its sum of squared
// deviations.
extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_moments(const ELEMENT* x, float* partial, unsigned rows) {
    __shared__ Columns means, distances;
    __shared__ unsigned counts[ROWS_AT_ONCE];
    const int row_thread = threadIdx.x % ROW_THREADS, thread_row = threadIdx.x / ROW_THREADS;
    const int first = blockIdx.x % TILES * TILE, column = first + row_thread * N;
    const unsigned part = blockIdx.x / TILES, parts = gridDim.x / TILES;
    float mean[N] = {}, squares[N] = {};
    unsigned count = 0;
    for (unsigned row = part * ROWS_AT_ONCE + thread_row; row < rows; row += parts * ROWS_AT_ONCE) {
        float values[N];
        read(x + (size_t)row * PITCH, column, values);
        count++;
        const float share = 1.0f / count;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float distance = values[i] - mean[i];
            mean[i] += distance * share;
            squares[i] += distance * (values[i] - mean[i]);
        }
    }
    keep(mean, means);
    keep(squares, distances);
    if (row_thread == 0) {
        counts[thread_row] = count;
    }
    __syncthreads();
    const int at = threadIdx.x;
    if (at >= TILE || first + at >= WIDTH) {
        return;
    }
    const unsigned all = rows_of(part, parts, rows);
    double sum = 0.0, square = 0.0;
    for (int row = 0; row < ROWS_AT_ONCE; row++) {
        sum += counts[row] * (double)column_of(means, row, at);
    }
    const double middle = sum / all;
    for (int row = 0; row < ROWS_AT_ONCE; row++) {
        const double distance = column_of(means, row, at) - middle;
        square += column_of(distances, row, at) + counts[row] * (distance * distance);
    }
    partial[(size_t)2 * part * STEP + first + at] = (float)middle;
    partial[(size_t)(2 * part + 1) * STEP + first + at] = (float)square;
}

// saved: each channel's mean, then 1 / standard deviation. statistics: mean and unbiased variance,
// contiguous.
extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_statistics(const float* partial, float* saved, float* statistics, unsigned parts, unsigned rows) {
    __shared__ Shares<double> shares;
    const unsigned channel = joined_column(), share = own_share();
    double sum = 0.0, square = 0.0;
    for (unsigned part = share; part < parts && channel < WIDTH; part += SHARES) {
        sum += rows_of(part, parts, rows) * (double)partial[(size_t)2 * part * STEP + channel];
    }
    const double mean = join(shares, sum) / rows;
    for (unsigned part = share; part < parts && channel < WIDTH; part += SHARES) {
        const double distance = partial[(size_t)2 * part * STEP + channel] - mean;
        square += partial[(size_t)(2 * part + 1) * STEP + channel] + rows_of(part, parts, rows) * (distance * distance);
    }
    square = join(shares, square);
    if (share == 0 && channel < WIDTH) {
        saved[channel] = (float)mean;
        saved[STEP + channel] = (float)(1.0 / sqrt(square / rows + EPSILON));
        statistics[channel] = (float)mean;
        statistics[WIDTH + channel] = (float)(square / (rows - 1));
    }
}

// Computes saved from the running statistics.
extern "C" __global__ void __launch_bounds__(THREADS) batch_norm_running(const float* statistics, float* saved) {
    const unsigned channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel < WIDTH) {
        saved[channel] = statistics[channel];
        saved[STEP + channel] = (float)(1.0 / sqrt(statistics[WIDTH + channel] + EPSILON));
    }
}

// y = (x - mean) / deviation * gamma + beta + residual, followed by ReLU if relu. residual is
// optional.
extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_forward(const ELEMENT* x, const ELEMENT* residual, const float* gamma, const float* beta,
                       const float* saved, ELEMENT* y, unsigned rows, unsigned relu) {
    __shared__ Columns held;
    const int row_thread = threadIdx.x % ROW_THREADS, thread_row = threadIdx.x / ROW_THREADS;
    const int first = blockIdx.x % TILES * TILE, column = first + row_thread * N;
    float mean[N], scale[N], shift[N];
    of_columns(saved + STEP, first, row_thread, held, mean);
    of_columns(gamma, first, row_thread, held, scale);
#pragma unroll
    for (int i = 0; i < N; i++) {
        scale[i] *= mean[i];
    }
    of_columns(saved, first, row_thread, held, mean);
    of_columns(beta, first, row_thread, held, shift);
    const unsigned stride = gridDim.x / TILES * ROWS_AT_ONCE;
    for (unsigned row = blockIdx.x / TILES * ROWS_AT_ONCE + thread_row; row < rows; row += stride) {
        const size_t start = (size_t)row * PITCH;
        float values[N], other[N] = {};
        read(x + start, column, values);
        if (residual != nullptr) {
            read(residual + start, column, other);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            values[i] = (values[i] - mean[i]) * scale[i] + shift[i] + other[i];
            // NaN stays NaN.
            values[i] = relu != 0 && values[i] < 0.0f ? 0.0f : values[i];
        }
        write(values, y + start, column);
    }
}

// With y, dy becomes the gradient before ReLU. partial: for each block with the same columns, its
// sums for gamma, then for beta.
extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_backward(const ELEMENT* x, const ELEMENT* y, ELEMENT* dy, const float* saved, float* partial,
                        unsigned rows) {
    __shared__ Columns held, other;
    const int row_thread = threadIdx.x % ROW_THREADS, thread_row = threadIdx.x / ROW_THREADS;
    const int first = blockIdx.x % TILES * TILE, column = first + row_thread * N;
    const unsigned part = blockIdx.x / TILES, stride = gridDim.x / TILES * ROWS_AT_ONCE;
    float mean[N], inverse[N], d_gamma[N] = {}, d_beta[N] = {};
    of_columns(saved, first, row_thread, held, mean);
    of_columns(saved + STEP, first, row_thread, held, inverse);
    for (unsigned row = part * ROWS_AT_ONCE + thread_row; row < rows; row += stride) {
        const size_t start = (size_t)row * PITCH;
        float values[N], gradient[N];
        read(x + start, column, values);
        read(dy + start, column, gradient);
        if (y != nullptr) {
            float result[N];
            read(y + start, column, result);
#pragma unroll
            for (int i = 0; i < N; i++) {
                // A select, not a product: infinity times 0 would be NaN.
                gradient[i] = result[i] <= 0.0f ? 0.0f : gradient[i];
            }
            write(gradient, dy + start, column);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            d_gamma[i] += gradient[i] * ((values[i] - mean[i]) * inverse[i]);
            d_beta[i] += gradient[i];
        }
    }
    // Other threads might still be reading the columns.
    __syncthreads();
    keep(d_gamma, held);
    keep(d_beta, other);
    __syncthreads();
    const int at = threadIdx.x;
    if (at >= TILE || first + at >= WIDTH) {
        return;
    }
    double sum = 0.0, plain = 0.0;
    for (int row = 0; row < ROWS_AT_ONCE; row++) {
        sum += column_of(held, row, at);
        plain += column_of(other, row, at);
    }
    partial[(size_t)2 * part * STEP + first + at] = (float)sum;
    partial[(size_t)(2 * part + 1) * STEP + first + at] = (float)plain;
}

// Parameter gradients; factors: the values per channel that batch_norm_input needs. add: whether to
// add to the gradients.
extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_parameters(const float* partial, const float* gamma, const float* saved, float* factors, float* d_gamma,
                          float* d_beta, unsigned parts, unsigned rows, unsigned add) {
    __shared__ Shares<double> shares;
    const unsigned channel = joined_column(), share = own_share();
    const bool exists = channel < WIDTH;
    const double sum = join_parts(partial, parts, 2 * STEP, channel, exists, shares);
    const double plain = join_parts(partial + STEP, parts, 2 * STEP, channel, exists, shares);
    if (share == 0 && exists) {
        const float inverse = saved[STEP + channel];
        factors[channel] = (float)(sum / rows * inverse);
        factors[STEP + channel] = (float)(plain / rows);
        factors[2 * STEP + channel] = gamma[channel] * inverse;
        d_gamma[channel] = add != 0 ? d_gamma[channel] + (float)sum : (float)sum;
        d_beta[channel] = add != 0 ? d_beta[channel] + (float)plain : (float)plain;
    }
}

// dx from the gradient before ReLU. add: whether to add to dx.
extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_input(const ELEMENT* x, const ELEMENT* dy, const float* saved, const float* factors, ELEMENT* dx,
                     unsigned rows, unsigned add) {
    __shared__ Columns held;
    const int row_thread = threadIdx.x % ROW_THREADS, thread_row = threadIdx.x / ROW_THREADS;
    const int first = blockIdx.x % TILES * TILE, column = first + row_thread * N;
    float mean[N], weight[N], offset[N], slope[N];
    of_columns(saved, first, row_thread, held, mean);
    of_columns(factors, first, row_thread, held, weight);
    of_columns(factors + STEP, first, row_thread, held, offset);
    of_columns(factors + 2 * STEP, first, row_thread, held, slope);
    const unsigned stride = gridDim.x / TILES * ROWS_AT_ONCE;
    for (unsigned row = blockIdx.x / TILES * ROWS_AT_ONCE + thread_row; row < rows; row += stride) {
        const size_t start = (size_t)row * PITCH;
        float values[N], gradient[N], sum[N] = {};
        read(x + start, column, values);
        read(dy + start, column, gradient);
        if (add != 0) {
            read(dx + start, column, sum);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            sum[i] += slope[i] * (gradient[i] - offset[i] - (values[i] - mean[i]) * weight[i]);
        }
        write(sum, dx + start, column);
    }
}
