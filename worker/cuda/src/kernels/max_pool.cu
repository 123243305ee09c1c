// Max pooling per window and channel, forward and backward. Pixels are rows of WIDTH channels of
// type ELEMENT with pitch PITCH.
#include "rows.cuh"
#include "windows.cuh"

constexpr int THREADS = 256;
constexpr unsigned VECTORS = (WIDTH + N - 1) / N;

// The index of the maximum within its window for each of N elements, one byte each.
struct alignas(N) Places {
    unsigned words[N / 4];
};

// places: row * KERNEL + column of the first maximum; NaN counts as largest. Optional.
extern "C" __global__ void __launch_bounds__(THREADS)
    max_pool(const ELEMENT* x, ELEMENT* y, Places* places, unsigned images) {
    const unsigned count = images * RESULT_PIXELS * VECTORS;
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < count; at += gridDim.x * THREADS) {
        const unsigned result = at / VECTORS, column = at % VECTORS * N;
        const int top = begin_of(result % RESULT_PIXELS / RESULT_COLUMNS), left = begin_of(result % RESULT_COLUMNS);
        const ELEMENT* image = x + (size_t)(result / RESULT_PIXELS) * IMAGE_PIXELS * PITCH;
        float best[N];
        unsigned place[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            best[i] = __uint_as_float(0xff800000);
            place[i] = max(-top, 0) * KERNEL + max(-left, 0);
        }
        for (int row = max(-top, 0); row < min(KERNEL, IMAGE_ROWS - top); row++) {
            for (int across = max(-left, 0); across < min(KERNEL, IMAGE_COLUMNS - left); across++) {
                float values[N];
                read(image + (size_t)((top + row) * IMAGE_COLUMNS + left + across) * PITCH, column, values);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const bool is_larger = values[i] > best[i] || values[i] != values[i];
                    best[i] = is_larger ? values[i] : best[i];
                    place[i] = is_larger ? row * KERNEL + across : place[i];
                }
            }
        }
        write(best, y + (size_t)result * PITCH, column);
        if (places != nullptr) {
            Places packed = {};
#pragma unroll
            for (int i = 0; i < N; i++) {
                packed.words[i / 4] |= place[i] << 8 * (i % 4);
            }
            places[at] = packed;
        }
    }
}

// Each pixel gathers from the windows whose maximum it is. add: whether to add to dx. 4 blocks per
// multiprocessor: by default ptxas targets more, and spills.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    max_pool_backward(const ELEMENT* dy, const Places* places, ELEMENT* dx, unsigned images, unsigned add) {
    const unsigned count = images * IMAGE_PIXELS * VECTORS;
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < count; at += gridDim.x * THREADS) {
        const unsigned pixel = at / VECTORS, column = at % VECTORS * N;
        const unsigned row = pixel % IMAGE_PIXELS / IMAGE_COLUMNS, across = pixel % IMAGE_COLUMNS;
        const unsigned first = pixel / IMAGE_PIXELS * RESULT_PIXELS;
        float sum[N] = {};
        if (add != 0) {
            read(dx + (size_t)pixel * PITCH, column, sum);
        }
        for (unsigned i = first_window(row); i < end_window(row, RESULT_ROWS); i++) {
            for (unsigned j = first_window(across); j < end_window(across, RESULT_COLUMNS); j++) {
                const unsigned result = first + i * RESULT_COLUMNS + j;
                const unsigned own = (row - begin_of(i)) * KERNEL + across - begin_of(j);
                const Places found = places[result * VECTORS + at % VECTORS];
                float values[N];
                read(dy + (size_t)result * PITCH, column, values);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    sum[n] += (found.words[n / 4] >> 8 * (n % 4) & 0xff) == own ? values[n] : 0.0f;
                }
            }
        }
        write(sum, dx + (size_t)pixel * PITCH, column);
    }
}
