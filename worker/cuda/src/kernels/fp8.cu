// Quantises GEMM operands to FP8. Each tensor has one scale: the largest power of two that takes
// none of its values beyond the format's range, so scaling itself does not round. The GEMM
// multiplies by its inverse. Rows have WIDTH elements of type ELEMENT, a multiple of 16, with pitch
// PITCH; FP8 rows are contiguous.
#include "rows.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / LANES;
// FP8 values per 16 bytes.
constexpr int PART = 16;
// Rows and columns that a block transposes at once; a thread has 4 x N of them. In shared memory a
// word holds four rows of a column, and the column pitch in words is chosen so that reads of a part
// use all banks.
constexpr int TILE_ROWS = 128;
constexpr int TILE_COLUMNS = 64;
constexpr int TILE_PITCH = TILE_ROWS / 4 + 1;

struct e4m3 {};
struct e5m2 {};

template <class T>
constexpr float LARGEST = 448.0f;
template <>
constexpr float LARGEST<e5m2> = 57344.0f;

// Rounds to nearest, ties to even; NaN stays NaN.
template <class T>
__device__ inline unsigned short narrow_two(float low, float high);

template <>
__device__ inline unsigned short narrow_two<e4m3>(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

template <>
__device__ inline unsigned short narrow_two<e5m2>(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline unsigned narrow_four(float a, float b, float c, float d) {
    return narrow_two<TO>(a, b) | (unsigned)narrow_two<TO>(c, d) << 16;
}

// Maximum over a block, returned to all threads. Call only once per kernel.
__device__ inline float block_largest(float value) {
    __shared__ float parts[WARPS];
    value = warp_max(value);
    if (threadIdx.x % LANES == 0) {
        parts[threadIdx.x / LANES] = value;
    }
    __syncthreads();
    float largest = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        largest = fmaxf(largest, parts[warp]);
    }
    return largest;
}

// partial: the largest magnitude of each block. NaN is ignored.
extern "C" __global__ void __launch_bounds__(THREADS) maxima(const ELEMENT* x, float* partial, unsigned rows) {
    constexpr unsigned VECTORS = WIDTH / N;
    float largest = 0.0f;
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < rows * VECTORS; at += gridDim.x * THREADS) {
        float values[N];
        load(x + (size_t)(at / VECTORS) * PITCH + at % VECTORS * N, values);
#pragma unroll
        for (int i = 0; i < N; i++) {
            largest = fmaxf(largest, fabsf(values[i]));
        }
    }
    largest = block_largest(largest);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = largest;
    }
}

// The scale of the values; the first thread of the grid writes its inverse for the GEMM.
__device__ inline float scale(const float* partial, unsigned count, float* inverse) {
    float largest = 0.0f;
    for (unsigned at = threadIdx.x; at < count; at += THREADS) {
        largest = fmaxf(largest, partial[at]);
    }
    largest = block_largest(largest);
    const bool is_first = blockIdx.x == 0 && threadIdx.x == 0;
    // FP8 cannot carry the infinity, so the inverse does: every sum becomes non-finite.
    if (largest > 3.402823466e+38f) {
        if (is_first) {
            *inverse = largest;
        }
        return 1.0f;
    }
    const unsigned bits = __float_as_uint(fminf(LARGEST<TO> / largest, 8.507059173e+37f)) & 0x7f800000;
    if (is_first) {
        *inverse = __uint_as_float(0x7f000000 - bits);
    }
    return __uint_as_float(bits);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize(const ELEMENT* x, const float* partial, uint2* y, float* inverse, unsigned rows, unsigned partials) {
    constexpr unsigned VECTORS = WIDTH / N;
    const float factor = scale(partial, partials, inverse);
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < rows * VECTORS; at += gridDim.x * THREADS) {
        float values[N];
        load(x + (size_t)(at / VECTORS) * PITCH + at % VECTORS * N, values);
#pragma unroll
        for (int i = 0; i < N; i++) {
            values[i] *= factor;
        }
        y[at] = make_uint2(narrow_four(values[0], values[1], values[2], values[3]),
                           narrow_four(values[4], values[5], values[6], values[7]));
    }
}

// Quantises and transposes; the number of rows is a multiple of 16 as well.
extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_transposed(const ELEMENT* x, const float* partial, uint4* y, float* inverse, unsigned rows, unsigned partials) {
    static_assert(TILE_ROWS / 4 * (TILE_COLUMNS / N) == THREADS);
    __shared__ unsigned tile[TILE_COLUMNS * TILE_PITCH];
    constexpr unsigned ACROSS = (WIDTH + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const float factor = scale(partial, partials, inverse);
    const unsigned tiles = ACROSS * ((rows + TILE_ROWS - 1) / TILE_ROWS);
    for (unsigned at = blockIdx.x; at < tiles; at += gridDim.x) {
        const unsigned first_row = at / ACROSS * TILE_ROWS, first_column = at % ACROSS * TILE_COLUMNS;
        const unsigned four = threadIdx.x / (TILE_COLUMNS / N), own = threadIdx.x % (TILE_COLUMNS / N) * N;
        __syncthreads();
        if (first_row + 4 * four < rows && first_column + own < WIDTH) {
            const ELEMENT* const from = x + (size_t)(first_row + 4 * four) * PITCH + first_column + own;
            float values[4][N];
#pragma unroll
            for (int row = 0; row < 4; row++) {
                load(from + (size_t)row * PITCH, values[row]);
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                tile[(own + i) * TILE_PITCH + four] = narrow_four(values[0][i] * factor, values[1][i] * factor,
                                                                  values[2][i] * factor, values[3][i] * factor);
            }
        }
        __syncthreads();
        constexpr unsigned PARTS = TILE_ROWS / PART;
        for (unsigned part = threadIdx.x; part < TILE_COLUMNS * PARTS; part += THREADS) {
            const unsigned column = part / PARTS, row = part % PARTS * PART;
            if (first_column + column < WIDTH && first_row + row < rows) {
                const unsigned* const words = tile + column * TILE_PITCH + row / 4;
                y[((size_t)(first_column + column) * rows + first_row + row) / PART] =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}
