// Functions that CUDA kernels and their CPU tests compile alike: index arithmetic and arithmetic per element.
#pragma once

#ifdef __CUDACC__
#define TWOFOLD_HD __host__ __device__ __forceinline__
#else
#define TWOFOLD_HD inline
#endif
