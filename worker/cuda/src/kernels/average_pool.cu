// Mean over the PIXELS of an image, forward and backward. Pixels are rows of WIDTH channels of type
// ELEMENT with pitch PITCH. A thread processes all pixels of its channels, so the gradient of a
// mean is read once.
#include "rows.cuh"

constexpr int THREADS = 256;
constexpr unsigned VECTORS = (WIDTH + N - 1) / N;

extern "C" __global__ void __launch_bounds__(THREADS) average_pool(const ELEMENT* x, ELEMENT* y, unsigned images) {
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < images * VECTORS; at += gridDim.x * THREADS) {
        const unsigned image = at / VECTORS, column = at % VECTORS * N;
        float sum[N] = {};
#pragma unroll 4
        for (unsigned pixel = 0; pixel < PIXELS; pixel++) {
            float values[N];
            read(x + ((size_t)image * PIXELS + pixel) * PITCH, column, values);
#pragma unroll
            for (int i = 0; i < N; i++) {
                sum[i] += values[i];
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            sum[i] /= PIXELS;
        }
        write(sum, y + (size_t)image * PITCH, column);
    }
}

// add: whether to add to dx.
extern "C" __global__ void __launch_bounds__(THREADS)
    average_pool_backward(const ELEMENT* dy, ELEMENT* dx, unsigned images, unsigned add) {
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < images * VECTORS; at += gridDim.x * THREADS) {
        const unsigned image = at / VECTORS, column = at % VECTORS * N;
        float share[N];
        read(dy + (size_t)image * PITCH, column, share);
#pragma unroll
        for (int i = 0; i < N; i++) {
            share[i] /= PIXELS;
        }
#pragma unroll 4
        for (unsigned pixel = 0; pixel < PIXELS; pixel++) {
            ELEMENT* const to = dx + ((size_t)image * PIXELS + pixel) * PITCH;
            float sum[N] = {};
            if (add != 0) {
                read(to, column, sum);
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                sum[i] += share[i];
            }
            write(sum, to, column);
        }
    }
}
