// Kernels with one fault each. The lines that a finding may name are marked; for races, both sides,
// since either may come second. "twin" kernels are the same without the fault.
extern "C" __global__ void out_of_bounds(const float* x, float* y, unsigned count) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= count) {
        y[i] = x[i];  // fault: out_of_bounds
    }
}

extern "C" __global__ void shared_out_of_bounds(const float* x, float* y, int shift) {
    __shared__ float values[64];
    values[(int)threadIdx.x + shift] = x[threadIdx.x];  // fault: shared_out_of_bounds
    __syncthreads();
    y[threadIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void misaligned(const float* x, float* y, unsigned count) {
    const float4 four = *reinterpret_cast<const float4*>(x + count);  // fault: misaligned
    y[threadIdx.x] = four.x + four.w;
}

extern "C" __global__ void never_written(const float* x, float* y, unsigned count) {
    __shared__ float half[256];
    if (threadIdx.x < count) {
        half[threadIdx.x] = x[threadIdx.x];
    }
    __syncthreads();
    y[threadIdx.x] = half[threadIdx.x];  // fault: never_written
}

// Tree reduction in shared memory without the barrier between two levels.
extern "C" __global__ void shared_race(const float* x, float* y, unsigned count) {
    __shared__ float sums[256];
    sums[threadIdx.x] = threadIdx.x < count ? x[threadIdx.x] : 0.0f;
    __syncthreads();
    if (threadIdx.x < 128) {
        sums[threadIdx.x] += sums[threadIdx.x + 128];  // fault: shared_race
    }
    if (threadIdx.x < 64) {
        sums[threadIdx.x] += sums[threadIdx.x + 64];  // fault: shared_race
    }
    __syncthreads();
    y[threadIdx.x] = sums[threadIdx.x % 64];
}

// Lanes depend on each other without a warp barrier.
extern "C" __global__ void warp_race(const float* x, float* y, unsigned count) {
    __shared__ volatile float values[32];
    values[threadIdx.x] = threadIdx.x < count ? x[threadIdx.x] : 0.0f;
    y[threadIdx.x] = values[31 - threadIdx.x];  // fault: warp_race
}

extern "C" __global__ void warp_race_twin(const float* x, float* y, unsigned count) {
    __shared__ volatile float values[32];
    values[threadIdx.x] = threadIdx.x < count ? x[threadIdx.x] : 0.0f;
    __syncwarp();
    y[threadIdx.x] = values[31 - threadIdx.x];
}

// All blocks add to one value without an atomic operation.
extern "C" __global__ void global_race(const float* x, float* y, unsigned count) {
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (unsigned i = blockIdx.x; i < count; i += gridDim.x) {
            sum += x[i];
        }
        y[0] += sum;  // fault: global_race
    }
}

extern "C" __global__ void global_race_twin(const float* x, float* y, unsigned count) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        atomicAdd(y, x[i]);
    }
}

extern "C" __global__ void barrier_missed(const float* x, float* y, unsigned count) {
    if (threadIdx.x < count) {
        y[threadIdx.x] = x[threadIdx.x];
        __syncthreads();  // fault: barrier_missed
        y[threadIdx.x] = 2.0f * x[threadIdx.x];
    }
}

extern "C" __global__ void mask(const float* x, float* y, unsigned count) {
    if (threadIdx.x % 32 < count) {
        y[threadIdx.x] = __shfl_xor_sync(0xffffffff, x[threadIdx.x], 1);  // fault: mask
    }
}

extern "C" __global__ void inactive_lane(const float* x, float* y, unsigned count) {
    if (threadIdx.x < 24) {
        y[threadIdx.x] = __shfl_sync(0x00ffffff, x[threadIdx.x], count);  // fault: inactive_lane
    }
}

extern "C" __global__ void part_of_a_warp(const float* x, float* y, unsigned count) {
    if (threadIdx.x < count) {
        y[threadIdx.x] = x[threadIdx.x];
        __syncwarp(0x0000ffff);  // fault: part_of_a_warp
        y[threadIdx.x + 32] = y[count - 1 - threadIdx.x];
    }
}

extern "C" __global__ void undeclared(float* x, float* y, unsigned count) {
    if (threadIdx.x < count) {
        y[threadIdx.x] = x[threadIdx.x];
        x[threadIdx.x] = 0.0f;  // fault: undeclared
    }
}

extern "C" __global__ void endless(const float* x, volatile float* y, unsigned count) {
    while (y[0] != x[count]) {  // fault: endless
    }
}

__device__ void helper(float* y, float value) {
    y[threadIdx.x + 1] = value;  // fault: inlined
}

extern "C" __global__ void inlined(const float* x, float* y, unsigned count) {
    helper(y, x[threadIdx.x % count]);  // inlined here
}

extern "C" __global__ void strided(const float* x, float* y, unsigned count) {
    __shared__ float columns[32 * 32];
    for (unsigned i = 0; i < 32; i++) {
        columns[i * 32 + threadIdx.x] = x[threadIdx.x * 8];
    }
    __syncwarp();
    float sum = 0.0f;
    for (unsigned i = 0; i < 32; i++) {
        sum += columns[threadIdx.x * 32 + i];
    }
    y[threadIdx.x] = sum + count;
}
