// Tensor core products whose factors are loaded element by element according to the PTX ISA's
// layout, and matrices that are loaded at once.
struct Left {
    unsigned words[4];
};

struct Right {
    unsigned words[2];
};

// 16 x 16 elements, row-major. "Matrix fragments for mma.m16n8k16 with floating point type",
// elements a0 to a7.
__device__ inline Left left_of(const unsigned short* numbers) {
    const unsigned group = threadIdx.x >> 2, in_group = threadIdx.x % 4;
    Left left = {};
    for (unsigned i = 0; i < 8; i++) {
        const unsigned row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
        const unsigned column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
        left.words[i / 2] |= (unsigned)numbers[row * 16 + column] << (16 * (i % 2));
    }
    return left;
}

// 16 x 8 elements, row-major. Elements b0 to b3.
__device__ inline Right right_of(const unsigned short* numbers) {
    const unsigned group = threadIdx.x >> 2, in_group = threadIdx.x % 4;
    Right right = {};
    for (unsigned i = 0; i < 4; i++) {
        const unsigned row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
        right.words[i / 2] |= (unsigned)numbers[row * 8 + group] << (16 * (i % 2));
    }
    return right;
}

__device__ inline void multiply(const Left& left, const Right& right, float* sums, unsigned is_bf16) {
    const unsigned group = threadIdx.x >> 2, in_group = threadIdx.x % 4;
    float c[4];
    for (unsigned i = 0; i < 4; i++) {
        c[i] = sums[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)];
    }
    if (is_bf16 != 0) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(left.words[0]), "r"(left.words[1]), "r"(left.words[2]), "r"(left.words[3]),
                       "r"(right.words[0]), "r"(right.words[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(left.words[0]), "r"(left.words[1]), "r"(left.words[2]), "r"(left.words[3]),
                       "r"(right.words[0]), "r"(right.words[1]));
    }
    for (unsigned i = 0; i < 4; i++) {
        sums[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = c[i];
    }
}

extern "C" __global__ void product(const unsigned short* left, const unsigned short* right, float* sums, unsigned is_bf16) {
    multiply(left_of(left), right_of(right), sums, is_bf16);
}

// fault: swaps two registers of the left factor.
extern "C" __global__ void exchanged(const unsigned short* left, const unsigned short* right, float* sums, unsigned is_bf16) {
    Left wrong = left_of(left);
    const unsigned first = wrong.words[0];
    wrong.words[0] = wrong.words[1];
    wrong.words[1] = first;
    multiply(wrong, right_of(right), sums, is_bf16);
}

// The same product with factors loaded from shared memory by `ldmatrix`; the right one is row-major
// there.
extern "C" __global__ void loaded(const unsigned short* left, const unsigned short* right, float* sums, unsigned is_bf16) {
    __shared__ alignas(16) unsigned short tile[16 * 16 + 16 * 8];
    for (unsigned at = threadIdx.x; at < 16 * 16; at += 32) {
        tile[at] = left[at];
    }
    for (unsigned at = threadIdx.x; at < 16 * 8; at += 32) {
        tile[16 * 16 + at] = right[at];
    }
    __syncwarp();
    const unsigned short* const row = tile + threadIdx.x % 16 * 16 + threadIdx.x / 16 * 8;
    // Lanes 16 and up provide the same rows again.
    const unsigned short* const other = tile + 16 * 16 + threadIdx.x % 16 * 8;
    Left a;
    Right b;
    unsigned again[2];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a.words[0]), "=r"(a.words[1]), "=r"(a.words[2]), "=r"(a.words[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b.words[0]), "=r"(b.words[1]), "=r"(again[0]), "=r"(again[1])
                 : "r"((unsigned)__cvta_generic_to_shared(other))
                 : "memory");
    multiply(a, b, sums, is_bf16);
}
