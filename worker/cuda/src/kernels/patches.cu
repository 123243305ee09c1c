// im2col and col2im. Pixels are rows of WIDTH channels of type ELEMENT with pitch PITCH; a patch
// holds the channels of the KERNEL x KERNEL pixels of a window, contiguous, and patches have pitch
// PATCH_PITCH.
#include "rows.cuh"
#include "windows.cuh"

constexpr int THREADS = 256;
constexpr unsigned VECTORS = (WIDTH + N - 1) / N;
constexpr unsigned PATCH = KERNEL * KERNEL * WIDTH;
constexpr unsigned PATCH_VECTORS = (PATCH + N - 1) / N;
// Whether every vector is within one pixel.
constexpr bool IS_WHOLE = WIDTH % N == 0;

// Element `at` of a patch; zero outside the image.
__device__ inline float number(const ELEMENT* image, int top, int left, unsigned at) {
    const int tap = at / WIDTH, row = top + tap / KERNEL, across = left + tap % KERNEL;
    const bool is_inside = at < PATCH && row >= 0 && row < IMAGE_ROWS && across >= 0 && across < IMAGE_COLUMNS;
    return is_inside ? widen(image[(size_t)(row * IMAGE_COLUMNS + across) * PITCH + at % WIDTH]) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS) patches(const ELEMENT* x, ELEMENT* patches, unsigned images) {
    const unsigned count = images * RESULT_PIXELS * PATCH_VECTORS;
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < count; at += gridDim.x * THREADS) {
        const unsigned result = at / PATCH_VECTORS, first = at % PATCH_VECTORS * N;
        const int top = begin_of(result % RESULT_PIXELS / RESULT_COLUMNS), left = begin_of(result % RESULT_COLUMNS);
        const ELEMENT* image = x + (size_t)(result / RESULT_PIXELS) * IMAGE_PIXELS * PITCH;
        ELEMENT* const to = patches + (size_t)result * PATCH_PITCH + first;
        if constexpr (IS_WHOLE) {
            const int tap = first / WIDTH, row = top + tap / KERNEL, across = left + tap % KERNEL;
            uint4 values = make_uint4(0, 0, 0, 0);
            if (row >= 0 && row < IMAGE_ROWS && across >= 0 && across < IMAGE_COLUMNS) {
                const ELEMENT* from = image + (size_t)(row * IMAGE_COLUMNS + across) * PITCH + first % WIDTH;
                values = *reinterpret_cast<const uint4*>(from);
            }
            *reinterpret_cast<uint4*>(to) = values;
        } else {
            float values[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                values[i] = number(image, top, left, first + i);
            }
            // Padded with zeros up to the pitch.
            store(values, to);
        }
    }
}

// Each pixel sums its gradients in the patches that contain it, in order. add: whether to add to
// dx.
extern "C" __global__ void __launch_bounds__(THREADS)
    patches_backward(const ELEMENT* d_patches, ELEMENT* dx, unsigned images, unsigned add) {
    const unsigned count = images * IMAGE_PIXELS * VECTORS;
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < count; at += gridDim.x * THREADS) {
        const unsigned pixel = at / VECTORS, column = at % VECTORS * N;
        const unsigned row = pixel % IMAGE_PIXELS / IMAGE_COLUMNS, across = pixel % IMAGE_COLUMNS;
        const unsigned first = pixel / IMAGE_PIXELS * RESULT_PIXELS;
        const unsigned top = first_window(row), bottom = end_window(row, RESULT_ROWS);
        const unsigned left = first_window(across), right = end_window(across, RESULT_COLUMNS);
        // If the stride exceeds the window, most pixels are in no patch.
        if (add != 0 && (top >= bottom || left >= right)) {
            continue;
        }
        float sum[N] = {};
        if (add != 0) {
            read(dx + (size_t)pixel * PITCH, column, sum);
        }
        for (unsigned i = top; i < bottom; i++) {
            for (unsigned j = left; j < right; j++) {
                const unsigned tap = (row - begin_of(i)) * KERNEL + across - begin_of(j);
                const ELEMENT* from =
                    d_patches + (size_t)(first + i * RESULT_COLUMNS + j) * PATCH_PITCH + tap * WIDTH + column;
                float values[N] = {};
                if constexpr (IS_WHOLE) {
                    load(from, values);
                } else {
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        values[n] = column + n < WIDTH ? widen(from[n]) : 0.0f;
                    }
                }
#pragma unroll
                for (int n = 0; n < N; n++) {
                    sum[n] += values[n];
                }
            }
        }
        write(sum, dx + (size_t)pixel * PITCH, column);
    }
}
