// Functions that CUDA kernels and the CPU compile alike: index arithmetic, numbers as bits, formats of
// weights.
#pragma once

#ifdef __CUDACC__
#define TWOFOLD_HD __host__ __device__ __forceinline__
#define TWOFOLD_ALWAYS TWOFOLD_HD
#else
#define TWOFOLD_HD inline
// Where a loop around a call is unrolled only if the call is gone by then.
#define TWOFOLD_ALWAYS [[gnu::always_inline]] inline
#endif
