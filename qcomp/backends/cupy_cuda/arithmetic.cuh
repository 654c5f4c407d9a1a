// All arithmetic, as PTX instructions: they round to nearest, keep subnormals and are never fused into a
// multiply-add, whatever the compiler options. CuPy compiles everything with -ftz=true, even if asked for --ftz=false.
// Intrinsics such as __fadd_rn follow that option. So do comparisons of floats, which is why the kernels compare bits.

__device__ inline float add(float a, float b) {
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ inline float subtract(float a, float b) {
    float result;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ inline float multiply(float a, float b) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ inline float divide(float a, float b) {
    float result;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ inline float square_root(float a) {
    float result;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(a));
    return result;
}

// Round to the nearest integer, ties to even. Values beyond the range of int saturate; NaN becomes 0.
__device__ inline int round_to_int(float a) {
    int result;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(result) : "f"(a));
    return result;
}

// Round towards zero; otherwise the same as round_to_int.
__device__ inline int truncate_to_int(float a) {
    int result;
    asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(result) : "f"(a));
    return result;
}
