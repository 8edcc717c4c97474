// A packed matrix of an expert as plain rows, for libraries that multiply those: how training computes on a device.
#pragma once
#include <cstdint>

#include "expert_layer.h"

namespace twofold::cuda {

struct UnpackedMatrix {
  kernels::WeightFormat format;
  const void* panels;  // in device memory
  int rows;
  int columns;  // a multiple of 16
  void* out;    // [rows][columns] in float32 or bf16
  bool is_bf16;
};

// The values of the CPU's dequantisation, rounded to bf16 where asked for. A cudaError_t as int, as all launchers.
int launch_unpack_matrix(const UnpackedMatrix& matrix, Stream stream);

}  // namespace twofold::cuda
