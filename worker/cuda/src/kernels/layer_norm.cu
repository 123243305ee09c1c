// Layer norm of rows of WIDTH elements of type ELEMENT with pitch PITCH (a multiple of 16 bytes).
// One warp, or several for wide rows, holds a whole row in registers, so the row is read once.
// Compiled per width: guards at the row's end vanish where the width is a multiple.
#include "parts.cuh"
#include "rows.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / LANES;
// Warps per row: in backward, a lane with more than 32 elements would spill.
constexpr int GROUP = WIDTH <= 1024 ? 1 : WIDTH <= 2048 ? 2 : 4;
constexpr int ROW_THREADS = GROUP * LANES;
constexpr int ROWS_AT_ONCE = WARPS / GROUP;
constexpr int VECTORS = (WIDTH + ROW_THREADS * N - 1) / (ROW_THREADS * N);
constexpr float EPSILON = 1e-5f;

// The first column of a thread's vector; `row_thread` is the thread's index within its row.
__device__ inline int column(int vector, int row_thread) { return (vector * ROW_THREADS + row_thread) * N; }

// Row sums exchanged between the warps of a row. Double-buffered: a warp that is a row ahead does
// not overwrite values that others still read.
template <int COUNT>
struct RowSums {
    float parts[2][COUNT][WARPS];
};

template <int COUNT>
__device__ inline void row_sums(float (&values)[COUNT], RowSums<COUNT>& sums, int& buffer) {
    const int warp = threadIdx.x / LANES;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        values[i] = warp_sum(values[i]);
    }
    if (GROUP == 1) {
        return;
    }
    if (threadIdx.x % LANES == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            sums.parts[buffer][i][warp] = values[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        values[i] = 0.0f;
#pragma unroll
        for (int other = 0; other < GROUP; other++) {
            values[i] += sums.parts[buffer][i][warp / GROUP * GROUP + other];
        }
    }
    buffer ^= 1;
}

// Per-column values in shared memory, laid out so that both a thread's vectors and a row's
// consecutive elements use all banks.
constexpr int PART = ROW_THREADS * 4 + (N > 4 ? LANES / 2 : 0);
constexpr int SLOTS = VECTORS * (N / 4) * PART;

// The four elements that start at element 4 * `part` of a thread's vector.
__device__ inline int slot(int vector, int row_thread, int part) { return (vector * (N / 4) + part) * (PART / 4) + row_thread; }

__device__ inline int slot_of(int column) {
    return slot(column / (ROW_THREADS * N), column / N % ROW_THREADS, column % N / 4);
}

// Copies a parameter, which all rows need.
__device__ inline void hold(const float* from, float4* to) {
    for (int at = threadIdx.x * 4; at < VECTORS * ROW_THREADS * N; at += THREADS * 4) {
        float part[4];
        read(from, at, part);
        to[slot_of(at)] = make_float4(part[0], part[1], part[2], part[3]);
    }
}

__device__ inline void held(const float4* from, int vector, int row_thread, float (&to)[N]) {
#pragma unroll
    for (int part = 0; part < N / 4; part++) {
        const float4 four = from[slot(vector, row_thread, part)];
        to[4 * part] = four.x;
        to[4 * part + 1] = four.y;
        to[4 * part + 2] = four.z;
        to[4 * part + 3] = four.w;
    }
}

// 3 blocks per multiprocessor: by default ptxas targets more, and spills.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    layer_norm_forward(const ELEMENT* x, const float* gamma, const float* beta, ELEMENT* y, float2* saved,
                       unsigned rows) {
    __shared__ float4 parameters[2][SLOTS / 4];
    __shared__ RowSums<1> exchange;
    int buffer = 0;
    const int row_thread = threadIdx.x % ROW_THREADS;
    hold(gamma, parameters[0]);
    hold(beta, parameters[1]);
    __syncthreads();
    // All warps of a block run the same number of iterations, because they can wait for each other;
    // rows past the last one are skipped.
    for (unsigned first = blockIdx.x * ROWS_AT_ONCE; first < rows; first += gridDim.x * ROWS_AT_ONCE) {
        const unsigned row = first + threadIdx.x / ROW_THREADS;
        const bool exists = row < rows;
        const size_t start = (size_t)(exists ? row : first) * PITCH;
        float values[VECTORS][N];
        float sum[1] = {0.0f};
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            read(x + start, column(v, row_thread), values[v]);
#pragma unroll
            for (int i = 0; i < N; i++) {
                sum[0] += values[v][i];
            }
        }
        row_sums(sum, exchange, buffer);
        const float mean = sum[0] / WIDTH;
        float squares[1] = {0.0f};
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float distance = column(v, row_thread) + i < WIDTH ? values[v][i] - mean : 0.0f;
                squares[0] += distance * distance;
            }
        }
        row_sums(squares, exchange, buffer);
        const float inverse = 1.0f / sqrtf(squares[0] / WIDTH + EPSILON);
        if (!exists) {
            continue;
        }
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            float scale[N], shift[N];
            held(parameters[0], v, row_thread, scale);
            held(parameters[1], v, row_thread, shift);
#pragma unroll
            for (int i = 0; i < N; i++) {
                values[v][i] = (values[v][i] - mean) * inverse * scale[i] + shift[i];
            }
            write(values[v], y + start, column(v, row_thread));
        }
        if (row_thread == 0) {
            saved[row] = make_float2(mean, inverse);
        }
    }
}

// partial: for each block WIDTH sums for gamma, then WIDTH for beta. add: whether to add to dx.
extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_backward(const ELEMENT* dy, const ELEMENT* x, const float* gamma, const float2* saved, ELEMENT* dx,
                        float* partial, unsigned rows, unsigned add) {
    // Initially gamma, then the sums of the block.
    __shared__ float4 sums[2][SLOTS / 4];
    __shared__ RowSums<2> exchange;
    int buffer = 0;
    const int row_thread = threadIdx.x % ROW_THREADS;
    hold(gamma, sums[0]);
    __syncthreads();
    float d_gamma[VECTORS][N] = {};
    float d_beta[VECTORS][N] = {};
    for (unsigned first = blockIdx.x * ROWS_AT_ONCE; first < rows; first += gridDim.x * ROWS_AT_ONCE) {
        const unsigned row = first + threadIdx.x / ROW_THREADS;
        const bool exists = row < rows;
        const size_t start = (size_t)(exists ? row : first) * PITCH;
        const float2 statistics = saved[exists ? row : first];
        const float mean = statistics.x, inverse = statistics.y;
        float gradient[VECTORS][N], normal[VECTORS][N];
        // Means of the scaled gradient, and of its product with the normalised row.
        float means[2] = {0.0f, 0.0f};
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            float scale[N];
            read(dy + start, column(v, row_thread), gradient[v]);
            read(x + start, column(v, row_thread), normal[v]);
            held(sums[0], v, row_thread, scale);
#pragma unroll
            for (int i = 0; i < N; i++) {
                normal[v][i] = (normal[v][i] - mean) * inverse;
                if (exists) {
                    d_gamma[v][i] += gradient[v][i] * normal[v][i];
                    d_beta[v][i] += gradient[v][i];
                }
                gradient[v][i] *= scale[i];
                means[0] += gradient[v][i];
                means[1] += gradient[v][i] * normal[v][i];
            }
        }
        row_sums(means, exchange, buffer);
        if (!exists) {
            continue;
        }
        const float plain = means[0] / WIDTH, weighted = means[1] / WIDTH;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            float old[N] = {};
            if (add != 0) {
                read(dx + start, column(v, row_thread), old);
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                old[i] += inverse * (gradient[v][i] - plain - normal[v][i] * weighted);
            }
            write(old, dx + start, column(v, row_thread));
        }
    }
    __syncthreads();
    // Add the threads of one row after those of another, so the order of the sum is fixed.
    for (int now = 0; now < ROWS_AT_ONCE; now++) {
        if (threadIdx.x / ROW_THREADS == now) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
#pragma unroll
                for (int part = 0; part < N; part += 4) {
                    const int at = slot(v, row_thread, part / 4);
                    float4 g = now == 0 ? make_float4(0, 0, 0, 0) : sums[0][at];
                    float4 b = now == 0 ? make_float4(0, 0, 0, 0) : sums[1][at];
                    g.x += d_gamma[v][part];
                    g.y += d_gamma[v][part + 1];
                    g.z += d_gamma[v][part + 2];
                    g.w += d_gamma[v][part + 3];
                    b.x += d_beta[v][part];
                    b.y += d_beta[v][part + 1];
                    b.z += d_beta[v][part + 2];
                    b.w += d_beta[v][part + 3];
                    sums[0][at] = g;
                    sums[1][at] = b;
                }
            }
        }
        __syncthreads();
    }
    const float* totals = reinterpret_cast<const float*>(sums);
    for (int i = threadIdx.x; i < 2 * WIDTH; i += THREADS) {
        const int half = i / WIDTH, at = i - half * WIDTH;
        partial[(size_t)blockIdx.x * 2 * WIDTH + i] = totals[half * SLOTS + 4 * slot_of(at) + at % 4];
    }
}

// Sums the partial gradients of all blocks in a fixed order. add: whether to add to the gradients.
extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_parameters(const float* partial, float* d_gamma, float* d_beta, unsigned blocks, unsigned add) {
    __shared__ Shares<float> shares;
    const unsigned i = joined_column();
    const bool exists = i < 2 * WIDTH;
    const float sum = join_parts(partial, blocks, 2 * WIDTH, i, exists, shares);
    if (own_share() == 0 && exists) {
        float* const to = i < WIDTH ? d_gamma + i : d_beta + (i - WIDTH);
        *to = add != 0 ? *to + sum : sum;
    }
}
