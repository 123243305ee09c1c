// One pass of AdamW over all parameters: unscaled gradient, moments, weight decay, and a 16-bit copy of the weight.
// Compiled without contraction to fused multiply-adds, every operation is rounded as on the CPU.
#include <cuda_bf16.h>

extern "C" __global__ void adamw(float* weight, float* first, float* second, const float* gradient,
                                 __nv_bfloat16* narrow, float rate, float beta1, float beta2, float epsilon,
                                 float decay, float unscale, float correction1, float correction2, int count) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        float g = gradient[i] * unscale;
        float m = beta1 * first[i] + (1.0f - beta1) * g;
        float v = beta2 * second[i] + (1.0f - beta2) * (g * g);
        float step = (m * correction1) / (sqrtf(v * correction2) + epsilon) + decay * weight[i];
        float w = weight[i] - rate * step;
        first[i] = m;
        second[i] = v;
        weight[i] = w;
        narrow[i] = __float2bfloat16_rn(w);
    }
}
