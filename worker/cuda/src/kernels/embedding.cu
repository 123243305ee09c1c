// Sums of token, position and segment embeddings. Rows have WIDTH elements, a multiple of 16 bytes;
// x and dx have pitch PITCH, tables are contiguous. Backward uses no atomics: it walks through the
// rows in token order, which the host has sorted.
#include "rows.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / LANES;
constexpr unsigned VECTORS = WIDTH / N;
// Backward processes four columns at a time, so accesses to both the 16-bit and the f32 tensors are
// contiguous.
constexpr unsigned FOURS = WIDTH / 4;
constexpr unsigned TILES = (FOURS + LANES - 1) / LANES;

// Adds a row of a table; NaN if the row does not exist.
__device__ inline void add_row(const ELEMENT* table, unsigned number, unsigned entries, unsigned column, float (&to)[N]) {
    float values[N];
    if (number < entries) {
        load(table + (size_t)number * WIDTH + column, values);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        to[i] += number < entries ? values[i] : __uint_as_float(0x7fc00000);
    }
}

// segments is optional. The position of a row is its index modulo context.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding(const unsigned* tokens, const ELEMENT* token_table, unsigned token_entries, const ELEMENT* positions,
              unsigned context, const unsigned* segments, const ELEMENT* segment_table, unsigned segment_entries,
              ELEMENT* x, unsigned rows) {
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < rows * VECTORS; at += gridDim.x * THREADS) {
        const unsigned row = at / VECTORS, column = at % VECTORS * N;
        float sum[N] = {};
        add_row(token_table, tokens[row], token_entries, column, sum);
        add_row(positions, row % context, context, column, sum);
        if (segments != nullptr) {
            add_row(segment_table, segments[row], segment_entries, column, sum);
        }
        store(sum, x + (size_t)row * PITCH + column);
    }
}

__device__ inline void add_four(const float (&values)[4], float* to) {
    float old[4];
    load(to, old);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        old[i] += values[i];
    }
    store(old, to);
}

// A warp sums LANES rows, sorted by id. Runs of equal ids that are complete within these rows are
// added to the gradient. The partial sum of a run that began earlier goes to the first of these
// rows' two rows in `partial`; that of a run that begins here and continues, to the second.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_gradient(const unsigned* numbers, const unsigned* order, const ELEMENT* dx, float* partial, float* gradient,
                       unsigned entries, unsigned rows) {
    const unsigned lane = threadIdx.x % LANES, chunks = (rows + LANES - 1) / LANES;
    for (unsigned item = blockIdx.x * WARPS + threadIdx.x / LANES; item < chunks * TILES; item += gridDim.x * WARPS) {
        const unsigned chunk = item / TILES, column = 4 * (item % TILES * LANES + lane);
        const unsigned begin = chunk * LANES, count = min((unsigned)LANES, rows - begin);
        const unsigned row = order[min(begin + lane, rows - 1)], number = numbers[row];
        const unsigned first = __shfl_sync(ALL_LANES, number, 0), last = __shfl_sync(ALL_LANES, number, LANES - 1);
        const bool continued = begin > 0 && numbers[order[begin - 1]] == first;
        const bool continues = begin + count < rows && numbers[order[begin + count]] == last;
        float sum[4] = {};
        for (unsigned i = 0; i < count; i++) {
            const unsigned current = __shfl_sync(ALL_LANES, number, i), next = __shfl_sync(ALL_LANES, number, (i + 1) % LANES);
            const size_t start = (size_t)__shfl_sync(ALL_LANES, row, i) * PITCH;
            if (column >= WIDTH) {
                continue;
            }
            float values[4];
            load_four(dx + start + column, values);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                sum[k] += values[k];
            }
            if (i + 1 < count && next == current) {
                continue;
            }
            if (continued && current == first) {
                store(sum, partial + (size_t)2 * chunk * WIDTH + column);
            } else if (continues && current == last) {
                store(sum, partial + ((size_t)2 * chunk + 1) * WIDTH + column);
            } else if (current < entries) {
                add_four(sum, gradient + (size_t)current * WIDTH + column);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                sum[k] = 0.0f;
            }
        }
    }
}

// Sums the runs that continue across chunks, one block per run, in a fixed order.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_runs(const unsigned* numbers, const unsigned* order, const float* partial, float* gradient, unsigned entries,
                   unsigned rows) {
    __shared__ float4 sums[WARPS][LANES];
    const unsigned lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, chunks = (rows + LANES - 1) / LANES;
    for (unsigned item = blockIdx.x; item < chunks * TILES; item += gridDim.x) {
        const unsigned chunk = item / TILES, column = 4 * (item % TILES * LANES + lane);
        const unsigned begin = chunk * LANES, end = begin + LANES;
        if (end >= rows) {
            continue;
        }
        const unsigned number = numbers[order[end - 1]];
        const bool continued = begin > 0 && numbers[order[begin - 1]] == number;
        if (numbers[order[end]] != number || continued || number >= entries) {
            continue;
        }
        float sum[4] = {};
        if (warp == 0 && column < WIDTH) {
            load(partial + ((size_t)2 * chunk + 1) * WIDTH + column, sum);
        }
        // Each step checks as many chunks as a warp has lanes, by their first rows.
        unsigned known = chunk + 1, more = LANES;
        for (; more == LANES; known += LANES) {
            const unsigned mine = known + lane;
            const bool same = mine < chunks && numbers[order[min(mine * LANES, rows - 1)]] == number;
            more = __popc(__ballot_sync(ALL_LANES, same));
            for (unsigned other = known + warp; other < known + more; other += WARPS) {
                if (column < WIDTH) {
                    float values[4];
                    load(partial + (size_t)2 * other * WIDTH + column, values);
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        sum[k] += values[k];
                    }
                }
            }
        }
        sums[warp][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        __syncthreads();
        if (warp == 0 && column < WIDTH) {
            for (int other = 1; other < WARPS; other++) {
                const float4 four = sums[other][lane];
                sum[0] += four.x;
                sum[1] += four.y;
                sum[2] += four.z;
                sum[3] += four.w;
            }
            add_four(sum, gradient + (size_t)number * WIDTH + column);
        }
        __syncthreads();
    }
}

// Sums over all sequences of a batch. add: whether to add to the gradient.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_positions(const ELEMENT* dx, float* gradient, unsigned context, unsigned rows, unsigned add) {
    for (unsigned at = blockIdx.x * THREADS + threadIdx.x; at < context * FOURS; at += gridDim.x * THREADS) {
        const unsigned position = at / FOURS, column = at % FOURS * 4;
        float sum[4] = {};
        for (unsigned row = position; row < rows; row += context) {
            float values[4];
            load_four(dx + (size_t)row * PITCH + column, values);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                sum[k] += values[k];
            }
        }
        float* to = gradient + (size_t)position * WIDTH + column;
        if (add != 0) {
            add_four(sum, to);
        } else {
            store(sum, to);
        }
    }
}
