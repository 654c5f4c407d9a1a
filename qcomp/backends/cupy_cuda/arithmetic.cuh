// The operations that make every result, as instructions of their own: rounded to nearest, subnormals kept, never
// joined to a fused multiply-add, whatever the compiler was told. CuPy compiles everything with -ftz=true, also what
// asks for --ftz=false, and __fadd_rn and its kind follow that option; so do comparisons of floats, which is why the
// kernels compare bits.

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

// To the nearest integer, ties to even; the nearest there is for what no int holds, 0 for NaN.
__device__ inline int round_to_int(float a) {
    int result;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(result) : "f"(a));
    return result;
}

// Towards zero, otherwise as above.
__device__ inline int truncate_to_int(float a) {
    int result;
    asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(result) : "f"(a));
    return result;
}
