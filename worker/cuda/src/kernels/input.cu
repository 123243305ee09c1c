// Converts contiguous host samples to rows of WIDTH elements of type ELEMENT with pitch PITCH:
// image bytes, normalised with the mean and deviation of their channel (IS_IMAGE), or f32 values.
// Goes through shared memory, because input words and output vectors start at different elements.
// Every operation is rounded as on a CPU.
#include "rows.cuh"

constexpr int THREADS = 256;
constexpr unsigned VECTORS = (WIDTH + N - 1) / N;
// Sample elements per word.
constexpr unsigned IN_WORD = IS_IMAGE ? 4 : 1;

// The sample element with which a vector starts.
__device__ inline unsigned start(unsigned vector) { return vector / VECTORS * WIDTH + vector % VECTORS * N; }

// channels: interleaved mean and deviation of each channel; null for f32 values.
extern "C" __global__ void __launch_bounds__(THREADS)
    input(const unsigned* from, const float* channels, ELEMENT* to, unsigned rows) {
    __shared__ unsigned words[THREADS * N / IN_WORD + 1];
    const unsigned vectors = rows * VECTORS;
    for (unsigned first = blockIdx.x * THREADS; first < vectors; first += gridDim.x * THREADS) {
        const unsigned begin = start(first) / IN_WORD;
        const unsigned end = (start(min(first + THREADS, vectors)) + IN_WORD - 1) / IN_WORD;
        for (unsigned word = begin + threadIdx.x; word < end; word += THREADS) {
            words[word - begin] = from[word];
        }
        __syncthreads();
        const unsigned vector = first + threadIdx.x;
        if (vector < vectors) {
            const unsigned column = vector % VECTORS * N;
            float values[N] = {};
#pragma unroll
            for (int i = 0; i < N; i++) {
                if (column + i < WIDTH) {
                    const unsigned at = start(vector) + i, word = words[at / IN_WORD - begin];
                    if constexpr (IS_IMAGE) {
                        const unsigned byte = word >> 8 * (at % IN_WORD) & 0xff, channel = (column + i) % CHANNELS;
                        values[i] = (byte / 255.0f - channels[2 * channel]) / channels[2 * channel + 1];
                    } else {
                        values[i] = __uint_as_float(word);
                    }
                }
            }
            // Padded with zeros up to the pitch: a three-channel pixel is one access, not three.
            store(values, to + (size_t)(vector / VECTORS) * PITCH + column);
        }
        // The words are overwritten.
        __syncthreads();
    }
}
