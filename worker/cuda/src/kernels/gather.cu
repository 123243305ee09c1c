// Gather and scatter-add of rows of WIDTH elements of type ELEMENT with pitch PITCH.
#include "rows.cuh"

constexpr int THREADS = 256;
constexpr unsigned VECTORS = (WIDTH + N - 1) / N;

// Row i of y = row numbers[i] of the `of` rows of x; NaN if the row does not exist.
extern "C" __global__ void __launch_bounds__(THREADS)
    gather(const unsigned* numbers, const ELEMENT* x, ELEMENT* y, unsigned of, unsigned rows) {
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < rows * VECTORS; at += gridDim.x * THREADS) {
        const unsigned row = at / VECTORS, column = at % VECTORS * N, from = numbers[row];
        float values[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            values[i] = __uint_as_float(0x7fc00000);
        }
        if (from < of) {
            read(x + (size_t)from * PITCH, column, values);
        }
        write(values, y + (size_t)row * PITCH, column);
    }
}

// Adds row i of dy to row numbers[i] of dx, if it exists. Indices must be unique; if numbers is
// null, the index is i.
extern "C" __global__ void __launch_bounds__(THREADS)
    scatter(const unsigned* numbers, const ELEMENT* dy, ELEMENT* dx, unsigned of, unsigned rows) {
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < rows * VECTORS; at += gridDim.x * THREADS) {
        const unsigned row = at / VECTORS, column = at % VECTORS * N, to = numbers == nullptr ? row : numbers[row];
        if (to >= of) {
            continue;
        }
        float values[N], sum[N];
        read(dy + (size_t)row * PITCH, column, values);
        read(dx + (size_t)to * PITCH, column, sum);
#pragma unroll
        for (int i = 0; i < N; i++) {
            sum[i] += values[i];
        }
        write(sum, dx + (size_t)to * PITCH, column);
    }
}
