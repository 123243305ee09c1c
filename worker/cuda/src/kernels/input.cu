// Samples as the host delivers them, without gaps, to rows of WIDTH numbers of type ELEMENT that lie PITCH apart: bytes of images, of which
// each is made a number with the mean and the deviation of its channel (IS_IMAGE), or numbers of 32 bits. Through shared memory, because
// words of the one side and vectors of the other begin at different numbers. Every operation is rounded as on a CPU.
#include "rows.cuh"

constexpr int THREADS = 256;
constexpr unsigned VECTORS = (WIDTH + N - 1) / N;
// Numbers of a sample in a word.
constexpr unsigned IN_WORD = IS_IMAGE ? 4 : 1;

// The number of a sample with which a vector begins.
__device__ inline unsigned start(unsigned vector) { return vector / VECTORS * WIDTH + vector % VECTORS * N; }

// channels: mean and deviation of each, one after the other; absent for numbers.
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
            // With zeros up to the pitch: a pixel of three channels is one access, and not three.
            store(values, to + (size_t)(vector / VECTORS) * PITCH + column);
        }
        // The words are overwritten.
        __syncthreads();
    }
}
