// Flash attention in f32 (head size HEAD, tensors of type ELEMENT). Probabilities are never
// materialised: forward walks through the keys tile by tile and rescales its sums whenever a larger
// score appears; backward recomputes the probabilities from the saved log-sum-exp of each query
// (Dao et al. 2022). A block has TILE queries, or TILE keys, of one head, and each warp ROWS of
// them. Lanes are the rows of the other side, or the columns of a head. No two blocks write to the
// same row. A row of qkv holds the queries of all heads, then their keys, then their values.
#include "device.cuh"

constexpr float LOG2_OF_E = 1.44269504f, LOG_OF_2 = 0.693147181f;
constexpr unsigned MINUS_INFINITY = 0xff800000;
constexpr int THREADS = 128;
constexpr int TILE = LANES;
constexpr int ROWS = TILE / (THREADS / LANES);
// Row pitch in a tile, in float4. Odd, so that eight lanes reading 16 bytes from eight rows use all
// banks.
constexpr int PITCH = HEAD / 4 | 1;
// Columns per lane.
constexpr int COLUMNS = (HEAD + LANES - 1) / LANES;

// All rows of head `column` in a tensor whose rows have `heads` heads.
template <class T>
struct Rows {
    T* start;
    size_t pitch;

    __device__ Rows(T* tensor, size_t first_row, unsigned heads, unsigned column)
        : start(tensor + (first_row * heads + column) * HEAD), pitch((size_t)heads * HEAD) {}

    __device__ T* at(unsigned row) const { return start + row * pitch; }
};

__device__ inline bool sees(unsigned query, unsigned key, unsigned context, unsigned causal) {
    return key < context && (causal == 0 || key <= query);
}

// Copies TILE rows from `first` on; zeros beyond the last one.
__device__ inline void fetch(const Rows<const ELEMENT>& from, unsigned first, unsigned context, float4* to) {
    constexpr int WIDTH = PER_VECTOR<ELEMENT>, VECTORS = HEAD / WIDTH;
    for (int at = threadIdx.x; at < TILE * VECTORS; at += THREADS) {
        const int row = at / VECTORS, vector = at % VECTORS;
        float numbers[WIDTH] = {};
        if (first + row < context) {
            load(from.at(first + row) + vector * WIDTH, numbers);
        }
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4) {
            to[row * PITCH + (vector * WIDTH + i) / 4] =
                make_float4(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]);
        }
    }
}

// Products of each of this warp's rows in one tile with this lane's row in another.
__device__ inline void multiply(const float4* rows, const float4* lanes, float (&to)[ROWS]) {
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES * ROWS;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        to[r] = 0.0f;
    }
#pragma unroll 4
    for (int column = 0; column < HEAD / 4; column++) {
        const float4 b = lanes[lane * PITCH + column];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float4 a = rows[(first + r) * PITCH + column];
            to[r] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
    }
}

// Weights of a tile's rows for each of this warp's rows. Only the warp itself accesses them.
__device__ inline float* weights_of(float4* weights, int row) {
    return reinterpret_cast<float*>(weights) + (threadIdx.x / LANES * ROWS + row) * TILE;
}

// Adds a tile's rows, weighted, to the sums of each of this warp's rows.
__device__ inline void accumulate(float4* weights, const float4* rows, float (&sums)[ROWS][COLUMNS]) {
    const float* const numbers = reinterpret_cast<const float*>(rows);
    const int lane = threadIdx.x % LANES;
#pragma unroll 2
    for (int k = 0; k < TILE; k += 4) {
        float values[4][COLUMNS];
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const int column = c * LANES + lane;
                values[i][c] = column < HEAD ? numbers[(k + i) * PITCH * 4 + column] : 0.0f;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float4 w = *reinterpret_cast<const float4*>(weights_of(weights, r) + k);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                sums[r][c] += w.x * values[0][c] + w.y * values[1][c] + w.z * values[2][c] + w.w * values[3][c];
            }
        }
    }
}

// Writes the sums of this warp's rows, which start at `first`.
__device__ inline void put(const float (&sums)[ROWS][COLUMNS], const Rows<ELEMENT>& to, unsigned first, unsigned context) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int column = c * LANES + threadIdx.x % LANES;
            if (first + r < context && column < HEAD) {
                narrow(sums[r][c], to.at(first + r) + column);
            }
        }
    }
}

// Writes one value per row of this warp; all lanes hold all of them.
__device__ inline void put_each(const float (&numbers)[ROWS], float* to, unsigned first, unsigned context) {
    const unsigned lane = threadIdx.x % LANES;
    float mine = 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        mine = lane == r ? numbers[r] : mine;
    }
    if (lane < ROWS && first + lane < context) {
        to[first + lane] = mine;
    }
}

// All three kernels fit 3 blocks per multiprocessor: by default ptxas targets more, and spills.
// saved: the log-sum-exp of the scores, per query and head, as in cuDNN's attention. `scale` makes
// the scores base-2 exponents. count: heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    attention(const ELEMENT* qkv, ELEMENT* out, float* saved, unsigned count, unsigned heads, unsigned context,
              unsigned causal, float scale) {
    extern __shared__ float4 tiles[];
    float4 *const queries = tiles, *const keys = queries + TILE * PITCH, *const values = keys + TILE * PITCH;
    float4* const weights = values + TILE * PITCH;
    const unsigned lane = threadIdx.x % LANES, tiles_of_head = (context + TILE - 1) / TILE;
    for (unsigned task = blockIdx.x; task < tiles_of_head * count; task += gridDim.x) {
        // The last queries see the most keys, so they start first.
        const unsigned head = task % count, start = (tiles_of_head - 1 - task / count) * TILE;
        const unsigned warp_row = start + threadIdx.x / LANES * ROWS, column = head % heads;
        const size_t row = (size_t)(head / heads) * context;
        const Rows<const ELEMENT> key_rows(qkv, row, 3 * heads, heads + column);
        const Rows<const ELEMENT> value_rows(qkv, row, 3 * heads, 2 * heads + column);
        fetch(Rows<const ELEMENT>(qkv, row, 3 * heads, column), start, context, queries);
        float sums[ROWS][COLUMNS] = {}, totals[ROWS] = {}, largest[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            largest[r] = __uint_as_float(MINUS_INFINITY);
        }
        const unsigned end = causal != 0 ? min(start + TILE, context) : context;
        for (unsigned first = 0; first < end; first += TILE) {
            fetch(key_rows, first, context, keys);
            fetch(value_rows, first, context, values);
            __syncthreads();
            float scores[ROWS];
            multiply(queries, keys, scores);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                // Every query sees the first key of every tile.
                const bool seen = sees(warp_row + r, first + lane, context, causal);
                const float score = seen ? scores[r] * scale : __uint_as_float(MINUS_INFINITY);
                const float new_max = fmaxf(largest[r], warp_max(score));
                const float rescale = exp2f(largest[r] - new_max), weight = exp2f(score - new_max);
                largest[r] = new_max;
                totals[r] = totals[r] * rescale + weight;
                weights_of(weights, r)[lane] = weight;
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    sums[r][c] *= rescale;
                }
            }
            __syncwarp();
            accumulate(weights, values, sums);
            __syncthreads();
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float total = warp_sum(totals[r]);
            largest[r] = LOG_OF_2 * (largest[r] + log2f(total));
            const float inverse = 1.0f / total;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                sums[r][c] *= inverse;
            }
        }
        put(sums, Rows<ELEMENT>(out, row, heads, column), warp_row, context);
        put_each(largest, saved + (size_t)head * context, warp_row, context);
    }
}

// Gradient of the queries. means: the inner product of the output and its gradient, per query and
// head, for `attention_keys`.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    attention_queries(const ELEMENT* qkv, const ELEMENT* out, const ELEMENT* d_out, const float* saved, float* means,
                      ELEMENT* d_qkv, unsigned count, unsigned heads, unsigned context, unsigned causal, float scale) {
    extern __shared__ float4 tiles[];
    float4 *const queries = tiles, *const d_outs = queries + TILE * PITCH, *const keys = d_outs + TILE * PITCH;
    float4 *const values = keys + TILE * PITCH, *const weights = values + TILE * PITCH;
    const unsigned lane = threadIdx.x % LANES, tiles_of_head = (context + TILE - 1) / TILE;
    for (unsigned task = blockIdx.x; task < tiles_of_head * count; task += gridDim.x) {
        const unsigned head = task % count, start = (tiles_of_head - 1 - task / count) * TILE;
        const unsigned warp_row = start + threadIdx.x / LANES * ROWS, column = head % heads;
        const size_t row = (size_t)(head / heads) * context;
        const Rows<const ELEMENT> key_rows(qkv, row, 3 * heads, heads + column);
        const Rows<const ELEMENT> value_rows(qkv, row, 3 * heads, 2 * heads + column);
        const Rows<const ELEMENT> out_rows(out, row, heads, column);
        fetch(Rows<const ELEMENT>(qkv, row, 3 * heads, column), start, context, queries);
        fetch(Rows<const ELEMENT>(d_out, row, heads, column), start, context, d_outs);
        __syncthreads();
        const float mine = lane < ROWS && warp_row + lane < context ? LOG2_OF_E * saved[(size_t)head * context + warp_row + lane] : 0.0f;
        float mean[ROWS], logarithm[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const unsigned query = warp_row + r;
            const float* const gradient = reinterpret_cast<const float*>(d_outs + (query - start) * PITCH);
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const int at = c * LANES + lane;
                sum += query < context && at < HEAD ? widen(out_rows.at(query)[at]) * gradient[at] : 0.0f;
            }
            mean[r] = warp_sum(sum);
            logarithm[r] = __shfl_sync(ALL_LANES, mine, r);
        }
        put_each(mean, means + (size_t)head * context, warp_row, context);
        float sums[ROWS][COLUMNS] = {};
        const unsigned end = causal != 0 ? min(start + TILE, context) : context;
        for (unsigned first = 0; first < end; first += TILE) {
            fetch(key_rows, first, context, keys);
            fetch(value_rows, first, context, values);
            __syncthreads();
            float scores[ROWS], d_weights[ROWS];
            multiply(queries, keys, scores);
            multiply(d_outs, values, d_weights);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const bool seen = sees(warp_row + r, first + lane, context, causal);
                const float weight = seen ? exp2f(scores[r] * scale - logarithm[r]) : 0.0f;
                weights_of(weights, r)[lane] = weight * (d_weights[r] - mean[r]) * (scale / LOG2_OF_E);
            }
            __syncwarp();
            accumulate(weights, keys, sums);
            __syncthreads();
        }
        put(sums, Rows<ELEMENT>(d_qkv, row, 3 * heads, column), warp_row, context);
    }
}

// Gradients of keys and values.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    attention_keys(const ELEMENT* qkv, const ELEMENT* d_out, const float* saved, const float* means, ELEMENT* d_qkv,
                   unsigned count, unsigned heads, unsigned context, unsigned causal, float scale) {
    extern __shared__ float4 tiles[];
    float4 *const keys = tiles, *const values = keys + TILE * PITCH, *const queries = values + TILE * PITCH;
    float4 *const d_outs = queries + TILE * PITCH, *const weights = d_outs + TILE * PITCH;
    float4* const d_scores = weights + TILE * TILE / 4;
    const unsigned lane = threadIdx.x % LANES, tiles_of_head = (context + TILE - 1) / TILE;
    for (unsigned task = blockIdx.x; task < tiles_of_head * count; task += gridDim.x) {
        // The first keys are seen by the most queries, so they start first.
        const unsigned head = task % count, start = task / count * TILE;
        const unsigned warp_row = start + threadIdx.x / LANES * ROWS, column = head % heads;
        const size_t row = (size_t)(head / heads) * context;
        const Rows<const ELEMENT> query_rows(qkv, row, 3 * heads, column);
        const Rows<const ELEMENT> d_out_rows(d_out, row, heads, column);
        fetch(Rows<const ELEMENT>(qkv, row, 3 * heads, heads + column), start, context, keys);
        fetch(Rows<const ELEMENT>(qkv, row, 3 * heads, 2 * heads + column), start, context, values);
        float d_keys[ROWS][COLUMNS] = {}, d_values[ROWS][COLUMNS] = {};
        for (unsigned first = causal != 0 ? start : 0; first < context; first += TILE) {
            fetch(query_rows, first, context, queries);
            fetch(d_out_rows, first, context, d_outs);
            const unsigned query = first + lane;
            const size_t at = (size_t)head * context + query;
            const float logarithm = query < context ? LOG2_OF_E * saved[at] : 0.0f, mean = query < context ? means[at] : 0.0f;
            __syncthreads();
            float scores[ROWS], d_weights[ROWS];
            multiply(keys, queries, scores);
            multiply(values, d_outs, d_weights);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const bool seen = query < context && sees(query, warp_row + r, context, causal);
                const float weight = seen ? exp2f(scores[r] * scale - logarithm) : 0.0f;
                weights_of(weights, r)[lane] = weight;
                weights_of(d_scores, r)[lane] = weight * (d_weights[r] - mean) * (scale / LOG2_OF_E);
            }
            __syncwarp();
            accumulate(weights, d_outs, d_values);
            accumulate(d_scores, queries, d_keys);
            __syncthreads();
        }
        put(d_keys, Rows<ELEMENT>(d_qkv, row, 3 * heads, heads + column), warp_row, context);
        put(d_values, Rows<ELEMENT>(d_qkv, row, 3 * heads, 2 * heads + column), warp_row, context);
    }
}
