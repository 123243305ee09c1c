// 16-bit flash attention on tensor cores (head size HEAD, type ELEMENT). Probabilities are never
// materialised: forward walks through the keys tile by tile and rescales its sums whenever a larger
// score appears; backward recomputes the probabilities from the saved log-sum-exp of each query
// (Dao et al. 2022). A block has queries, or keys, of one head, and each warp some of them, whose
// scores stay in registers: rounded to 16 bits, they are the left operand of the next product (Dao
// 2023). No two blocks write to the same row.
#include "attention.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128;
// Rows of the other side per tile.
constexpr int TILE = 64;
// 16-byte vectors per head.
constexpr int VECTORS = HEAD / 8;
// Padded with zeros to whole 16-element steps.
constexpr int PADDED = (VECTORS + 1) / 2 * 2;
constexpr int PITCH = PADDED + 1;
// A warp has this many times 16 rows. With two, it uses what it loads of the other side twice; only
// where its registers hold the sums.
constexpr int FORWARD = 2, QUERIES = HEAD > 64 ? 1 : 2, KEYS = 1;
// Rows of the other side for which a warp computes scores at once.
constexpr int FORWARD_CHUNK = HEAD > 64 ? 32 : 64, QUERIES_CHUNK = HEAD > 64 ? 64 : 32, KEYS_CHUNK = HEAD > 64 ? 32 : 64;

// A lane's share of 16 M x 8 N sums: for each 16 rows, two rows that are eight apart, and for each
// 8 columns, two elements of these rows.
template <int M, int N>
using Sums = float[M][N][4];

// Rows of a block, and the first row of a warp.
template <int M>
constexpr int ROWS = THREADS / LANES * 16 * M;
template <int M>
__device__ inline unsigned warp_row() {
    return threadIdx.x / LANES * 16 * M;
}

// A lane's row among its warp's rows, and its column among those of the other side, for element `i`
// of its sums.
__device__ inline unsigned row_of(int m, int i) { return m * 16 + threadIdx.x % LANES / 4 + i / 2 * 8; }
__device__ inline unsigned column_of(int n, int i) { return n * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Copies rows from `first` on; zeros beyond the last row, and beyond the head.
template <int COUNT>
__device__ inline void fetch(const Rows<const ELEMENT>& from, unsigned first, unsigned context, uint4* to) {
#pragma unroll 4
    for (int at = threadIdx.x; at < COUNT * PADDED; at += THREADS) {
        const int row = at / PADDED, vector = at % PADDED;
        uint4 numbers = make_uint4(0, 0, 0, 0);
        if (first + row < context && vector < VECTORS) {
            numbers = reinterpret_cast<const uint4*>(from.at(first + row))[vector];
        }
        to[row * PITCH + vector] = numbers;
    }
}

// Products of 16 M rows of one tile with 8 N rows of another.
template <int M, int N>
__device__ inline void multiply(const uint4* own, const uint4* others, float (&to)[M][N][4]) {
#pragma unroll
    for (int at = 0; at < M * N * 4; at++) {
        to[at / (N * 4)][at / 4 % N][at % 4] = 0.0f;
    }
// Not fully unrolled for wide heads: ptxas would load so far ahead that registers spill.
#pragma unroll 4
    for (int k = 0; k < PADDED; k += 2) {
        unsigned left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            load_matrices<PITCH>(own + m * 16 * PITCH + k, left[m]);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned right[4];
            load_matrices<PITCH>(others + n * 8 * PITCH + k, right);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<ELEMENT>(left[m], right[0], right[2], to[m][n]);
                multiply_add<ELEMENT>(left[m], right[1], right[3], to[m][n + 1]);
            }
        }
    }
}

// Adds 8 N tile rows to the sums of 16 M rows, with weights rounded to 16 bits.
template <int M, int N>
__device__ inline void accumulate(const float (&weights)[M][N][4], const uint4* rows, Sums<M, PADDED>& sums) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        unsigned left[M][4];
#pragma unroll
        for (int at = 0; at < M * 4; at++) {
            const float* const pair = weights[at / 4][n + at % 4 / 2] + at % 2 * 2;
            left[at / 4][at % 4] = narrow_pair<ELEMENT>(pair[0], pair[1]);
        }
#pragma unroll
        for (int column = 0; column < PADDED; column += 2) {
            unsigned right[4];
            load_transposed<PITCH>(rows + n * 8 * PITCH + column, right);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<ELEMENT>(left[m], right[0], right[1], sums[m][column]);
                multiply_add<ELEMENT>(left[m], right[2], right[3], sums[m][column + 1]);
            }
        }
    }
}

// Writes the sums of a warp's rows, which start at `first`, via its own rows of a tile, so that
// each lane writes 16 bytes.
template <int M>
__device__ inline void put(const Sums<M, PADDED>& sums, uint4* own, const Rows<ELEMENT>& to, unsigned first, unsigned context) {
    unsigned* const pairs = reinterpret_cast<unsigned*>(own);
#pragma unroll
    for (int at = 0; at < M * PADDED * 2; at++) {
        const int m = at / (PADDED * 2), n = at / 2 % PADDED, i = at % 2 * 2;
        pairs[row_of(m, i) * PITCH * 4 + column_of(n, i) / 2] = narrow_pair<ELEMENT>(sums[m][n][i], sums[m][n][i + 1]);
    }
    __syncwarp();
    for (int at = threadIdx.x % LANES; at < M * 16 * VECTORS; at += LANES) {
        const int row = at / VECTORS, vector = at % VECTORS;
        if (first + row < context) {
            reinterpret_cast<uint4*>(to.at(first + row))[vector] = own[row * PITCH + vector];
        }
    }
}

// Reduces over the four lanes that share rows.
__device__ inline float row_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

__device__ inline float row_sum(float value) {
    value += __shfl_xor_sync(ALL_LANES, value, 1);
    return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

// Whether no query of a range sees any key of a range, and whether every query sees every key.
__device__ inline bool is_unseen(unsigned query, unsigned queries, unsigned key, unsigned context, unsigned causal) {
    return query >= context || key >= context || (causal != 0 && key >= query + queries);
}

__device__ inline bool is_whole(unsigned query, unsigned key, unsigned keys, unsigned context, unsigned causal) {
    return key + keys <= context && (causal == 0 || key + keys <= query + 1);
}

// Writes one value for each of this lane's rows; the other three lanes hold it as well.
template <int M>
__device__ inline void put_each(const float (&numbers)[M][2], float* to, unsigned first, unsigned context) {
#pragma unroll
    for (int at = 0; at < M * 2; at++) {
        const unsigned row = first + row_of(at / 2, at % 2 * 2);
        if (threadIdx.x % 4 == 0 && row < context) {
            to[row] = numbers[at / 2][at % 2];
        }
    }
}

// saved: the log-sum-exp of the scores, per query and head, as in cuDNN's attention. `scale` makes
// the scores base-2 exponents. count: heads of all sequences.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention(const ELEMENT* qkv, ELEMENT* out, float* saved, unsigned count, unsigned heads, unsigned context,
              unsigned causal, float scale) {
    constexpr int M = FORWARD, N = FORWARD_CHUNK / 8;
    extern __shared__ uint4 tiles[];
    uint4 *const queries = tiles, *const keys = queries + ROWS<M> * PITCH, *const values = keys + TILE * PITCH;
    uint4* const own = queries + warp_row<M>() * PITCH;
    const unsigned tiles_of_head = (context + ROWS<M> - 1) / ROWS<M>;
    for (unsigned task = blockIdx.x; task < tiles_of_head * count; task += gridDim.x) {
        // The last queries see the most keys, so they start first.
        const unsigned head = task % count, start = (tiles_of_head - 1 - task / count) * ROWS<M>;
        const unsigned first_query = start + warp_row<M>(), column = head % heads;
        const size_t row = (size_t)(head / heads) * context;
        const Rows<const ELEMENT> key_rows(qkv, row, 3 * heads, heads + column);
        const Rows<const ELEMENT> value_rows(qkv, row, 3 * heads, 2 * heads + column);
        fetch<ROWS<M>>(Rows<const ELEMENT>(qkv, row, 3 * heads, column), start, context, queries);
        Sums<M, PADDED> sums = {};
        float totals[M][2] = {}, largest[M][2];
#pragma unroll
        for (int at = 0; at < M * 2; at++) {
            largest[at / 2][at % 2] = __uint_as_float(MINUS_INFINITY);
        }
        const unsigned end = causal != 0 ? min(start + ROWS<M>, context) : context;
        for (unsigned first = 0; first < end; first += TILE) {
            fetch<TILE>(key_rows, first, context, keys);
            fetch<TILE>(value_rows, first, context, values);
            __syncthreads();
            for (unsigned chunk = 0; chunk < TILE; chunk += FORWARD_CHUNK) {
                const unsigned first_key = first + chunk;
                if (is_unseen(first_query, M * 16, first_key, context, causal)) {
                    break;
                }
                Sums<M, N> scores;
                multiply(own, keys + chunk * PITCH, scores);
                if (!is_whole(first_query, first_key, FORWARD_CHUNK, context, causal)) {
#pragma unroll
                    for (int at = 0; at < M * N * 4; at++) {
                        const int m = at / (N * 4), n = at / 4 % N, i = at % 4;
                        const bool seen = sees(first_query + row_of(m, i), first_key + column_of(n, i), context, causal);
                        scores[m][n][i] = seen ? scores[m][n][i] : __uint_as_float(MINUS_INFINITY);
                    }
                }
#pragma unroll
                for (int at = 0; at < M * 2; at++) {
                    const int m = at / 2, half = at % 2;
                    float new_max = __uint_as_float(MINUS_INFINITY);
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        new_max = fmaxf(new_max, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
                    }
                    // Every query sees the first key of every chunk that its warp does not skip.
                    new_max = fmaxf(largest[m][half], row_max(new_max) * scale);
                    const float rescale = exp2f(largest[m][half] - new_max);
                    largest[m][half] = new_max;
                    totals[m][half] *= rescale;
#pragma unroll
                    for (int n = 0; n < N * 2; n++) {
                        float& score = scores[m][n / 2][2 * half + n % 2];
                        score = exp2f(score * scale - new_max);
                        totals[m][half] += score;
                    }
#pragma unroll
                    for (int n = 0; n < PADDED * 2; n++) {
                        sums[m][n / 2][2 * half + n % 2] *= rescale;
                    }
                }
                accumulate(scores, values + chunk * PITCH, sums);
            }
            __syncthreads();
        }
#pragma unroll
        for (int at = 0; at < M * 2; at++) {
            const int m = at / 2, half = at % 2;
            const float total = row_sum(totals[m][half]);
            largest[m][half] = LOG_OF_2 * (largest[m][half] + log2f(total));
            const float inverse = 1.0f / total;
#pragma unroll
            for (int n = 0; n < PADDED * 2; n++) {
                sums[m][n / 2][2 * half + n % 2] *= inverse;
            }
        }
        put<M>(sums, own, Rows<ELEMENT>(out, row, heads, column), first_query, context);
        put_each<M>(largest, saved + (size_t)head * context, first_query, context);
        // The next task's queries overwrite these.
        __syncthreads();
    }
}

// Gradient of the queries. means: the inner product of the output and its gradient, per query and
// head, for `attention_keys`.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_queries(const ELEMENT* qkv, const ELEMENT* out, const ELEMENT* d_out, const float* saved, float* means,
                      ELEMENT* d_qkv, unsigned count, unsigned heads, unsigned context, unsigned causal, float scale) {
    constexpr int M = QUERIES, N = QUERIES_CHUNK / 8;
    extern __shared__ uint4 tiles[];
    uint4 *const queries = tiles, *const d_outs = queries + ROWS<M> * PITCH, *const keys = d_outs + ROWS<M> * PITCH;
    uint4 *const values = keys + TILE * PITCH, *const own = queries + warp_row<M>() * PITCH;
    const uint4* const own_d_outs = d_outs + warp_row<M>() * PITCH;
    const unsigned tiles_of_head = (context + ROWS<M> - 1) / ROWS<M>;
    for (unsigned task = blockIdx.x; task < tiles_of_head * count; task += gridDim.x) {
        const unsigned head = task % count, start = (tiles_of_head - 1 - task / count) * ROWS<M>;
        const unsigned first_query = start + warp_row<M>(), column = head % heads;
        const size_t row = (size_t)(head / heads) * context;
        const Rows<const ELEMENT> key_rows(qkv, row, 3 * heads, heads + column);
        const Rows<const ELEMENT> value_rows(qkv, row, 3 * heads, 2 * heads + column);
        const Rows<const ELEMENT> out_rows(out, row, heads, column);
        fetch<ROWS<M>>(Rows<const ELEMENT>(qkv, row, 3 * heads, column), start, context, queries);
        fetch<ROWS<M>>(Rows<const ELEMENT>(d_out, row, heads, column), start, context, d_outs);
        __syncthreads();
        float mean[M][2], logarithm[M][2];
#pragma unroll
        for (int at = 0; at < M * 2; at++) {
            const unsigned own_row = row_of(at / 2, at % 2 * 2), query = first_query + own_row;
            float sum = 0.0f;
            for (int vector = threadIdx.x % 4; query < context && vector < VECTORS; vector += 4) {
                float y[8], dy[8];
                load(out_rows.at(query) + vector * 8, y);
                unpack<ELEMENT>(own_d_outs[own_row * PITCH + vector], dy);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sum += y[i] * dy[i];
                }
            }
            mean[at / 2][at % 2] = row_sum(sum);
            logarithm[at / 2][at % 2] = query < context ? LOG2_OF_E * saved[(size_t)head * context + query] : 0.0f;
        }
        put_each<M>(mean, means + (size_t)head * context, first_query, context);
        Sums<M, PADDED> sums = {};
        const unsigned end = causal != 0 ? min(start + ROWS<M>, context) : context;
        for (unsigned first = 0; first < end; first += TILE) {
            fetch<TILE>(key_rows, first, context, keys);
            fetch<TILE>(value_rows, first, context, values);
            __syncthreads();
            for (unsigned chunk = 0; chunk < TILE; chunk += QUERIES_CHUNK) {
                const unsigned first_key = first + chunk;
                if (is_unseen(first_query, M * 16, first_key, context, causal)) {
                    break;
                }
                Sums<M, N> scores, d_weights;
                multiply(own, keys + chunk * PITCH, scores);
                multiply(own_d_outs, values + chunk * PITCH, d_weights);
                const bool whole = is_whole(first_query, first_key, QUERIES_CHUNK, context, causal);
#pragma unroll
                for (int at = 0; at < M * N * 4; at++) {
                    const int m = at / (N * 4), n = at / 4 % N, i = at % 4;
                    const bool seen =
                        whole || sees(first_query + row_of(m, i), first_key + column_of(n, i), context, causal);
                    const float weight = seen ? exp2f(scores[m][n][i] * scale - logarithm[m][i / 2]) : 0.0f;
                    scores[m][n][i] = weight * (d_weights[m][n][i] - mean[m][i / 2]) * (scale / LOG2_OF_E);
                }
                accumulate(scores, keys + chunk * PITCH, sums);
            }
            __syncthreads();
        }
        put<M>(sums, own, Rows<ELEMENT>(d_qkv, row, 3 * heads, column), first_query, context);
        __syncthreads();
    }
}

// Gradients of keys and values.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_keys(const ELEMENT* qkv, const ELEMENT* d_out, const float* saved, const float* means, ELEMENT* d_qkv,
                   unsigned count, unsigned heads, unsigned context, unsigned causal, float scale) {
    constexpr int M = KEYS, N = KEYS_CHUNK / 8;
    extern __shared__ uint4 tiles[];
    uint4 *const keys = tiles, *const values = keys + ROWS<M> * PITCH, *const queries = values + ROWS<M> * PITCH;
    uint4* const d_outs = queries + TILE * PITCH;
    float* const logarithms = reinterpret_cast<float*>(d_outs + TILE * PITCH);
    float* const averages = logarithms + TILE;
    uint4 *const own_keys = keys + warp_row<M>() * PITCH, *const own_values = values + warp_row<M>() * PITCH;
    const unsigned tiles_of_head = (context + ROWS<M> - 1) / ROWS<M>;
    for (unsigned task = blockIdx.x; task < tiles_of_head * count; task += gridDim.x) {
        // The first keys are seen by the most queries, so they start first.
        const unsigned head = task % count, start = task / count * ROWS<M>;
        const unsigned first_key = start + warp_row<M>(), column = head % heads;
        const size_t row = (size_t)(head / heads) * context;
        const Rows<const ELEMENT> query_rows(qkv, row, 3 * heads, column);
        const Rows<const ELEMENT> d_out_rows(d_out, row, heads, column);
        fetch<ROWS<M>>(Rows<const ELEMENT>(qkv, row, 3 * heads, heads + column), start, context, keys);
        fetch<ROWS<M>>(Rows<const ELEMENT>(qkv, row, 3 * heads, 2 * heads + column), start, context, values);
        Sums<M, PADDED> d_keys = {}, d_values = {};
        for (unsigned first = causal != 0 ? start : 0; first < context; first += TILE) {
            fetch<TILE>(query_rows, first, context, queries);
            fetch<TILE>(d_out_rows, first, context, d_outs);
            if (threadIdx.x < TILE) {
                const unsigned query = first + threadIdx.x;
                const size_t at = (size_t)head * context + query;
                logarithms[threadIdx.x] = query < context ? LOG2_OF_E * saved[at] : 0.0f;
                averages[threadIdx.x] = query < context ? means[at] : 0.0f;
            }
            __syncthreads();
            for (unsigned chunk = 0; chunk < TILE; chunk += KEYS_CHUNK) {
                const unsigned first_query = first + chunk;
                if (is_unseen(first_query, KEYS_CHUNK, first_key, context, causal)) {
                    continue;
                }
                Sums<M, N> weights, d_scores;
                multiply(own_keys, queries + chunk * PITCH, weights);
                multiply(own_values, d_outs + chunk * PITCH, d_scores);
                // Queries beyond the last one are zeros, as are their gradients: they add nothing.
                const bool whole = causal == 0 || first_key + M * 16 <= first_query + 1;
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const float2 logarithm = reinterpret_cast<const float2*>(logarithms + chunk)[column_of(n, 0) / 2];
                    const float2 mean = reinterpret_cast<const float2*>(averages + chunk)[column_of(n, 0) / 2];
#pragma unroll
                    for (int at = 0; at < M * 4; at++) {
                        const int m = at / 4, i = at % 4;
                        const bool seen = whole || first_key + row_of(m, i) <= first_query + column_of(n, i);
                        const float exponent = weights[m][n][i] * scale - (i % 2 == 0 ? logarithm.x : logarithm.y);
                        const float weight = seen ? exp2f(exponent) : 0.0f;
                        weights[m][n][i] = weight;
                        const float d_weight = d_scores[m][n][i] - (i % 2 == 0 ? mean.x : mean.y);
                        d_scores[m][n][i] = weight * d_weight * (scale / LOG2_OF_E);
                    }
                }
                accumulate(weights, d_outs + chunk * PITCH, d_values);
                accumulate(d_scores, queries + chunk * PITCH, d_keys);
            }
            __syncthreads();
        }
        put<M>(d_keys, own_keys, Rows<ELEMENT>(d_qkv, row, 3 * heads, heads + column), first_key, context);
        put<M>(d_values, own_values, Rows<ELEMENT>(d_qkv, row, 3 * heads, 2 * heads + column), first_key, context);
        __syncthreads();
    }
}
