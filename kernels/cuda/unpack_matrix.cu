// Panels to rows. Eight threads share 16 columns of a panel, four rows each, so that a panel's words are read side by side.
#include "launch_shapes.h"
#include "machine.cuh"
#include "panel_dequantise.h"
#include "unpack_matrix.h"

namespace twofold::cuda {

namespace {

constexpr int kUnpackThreads = 128;
constexpr int kColumns = 16;  // that a thread unpacks

template <WeightFormat F>
__global__ void __launch_bounds__(kUnpackThreads)
    unpack_kernel(const uint8_t* panels, int64_t panel_bytes, int rows, int columns, void* out,
                  bool is_bf16) {
  const int quad = int(threadIdx.x) % kQuads;
  const int column = (int(blockIdx.x) * (kUnpackThreads / kQuads) + int(threadIdx.x) / kQuads) * kColumns;
  if (column >= columns) return;
  float values[kColumns][kRowsOfLane];
  dequantise_16<F>(panels + blockIdx.y * panel_bytes, column, quad, values);
#pragma unroll
  for (int r = 0; r < kRowsOfLane; ++r) {
    const int row = int(blockIdx.y) * kernels::kPanelRows + kRowsOfLane * quad + r;
    if (row >= rows) return;
    const int64_t at = int64_t(row) * columns + column;
    if (is_bf16) {
      uint32_t* const to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + at);
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) to[c / 2] = bf16_pair(values[c][r], values[c + 1][r]);
    } else {
      float* const to = static_cast<float*>(out) + at;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) to[c] = values[c][r];
    }
  }
}

}  // namespace

int launch_unpack_matrix(const UnpackedMatrix& matrix, Stream stream) {
  if (matrix.panels == nullptr || matrix.out == nullptr || matrix.rows < 1 || matrix.columns < kColumns ||
      matrix.columns % kColumns != 0)
    return cudaErrorInvalidValue;
  constexpr int kBlockColumns = kUnpackThreads / kQuads * kColumns;
  const dim3 grid((matrix.columns + kBlockColumns - 1) / kBlockColumns,
                  unsigned(kernels::num_panels(matrix.rows)));
  int result = cudaErrorInvalidValue;
  kernels::for_each_format([&]<class Format>(Format) {
    constexpr WeightFormat kFormat = kernels::kNumberOf<Format>;
    if (kFormat != matrix.format) return;
    result = launch(unpack_kernel<kFormat>, grid, kUnpackThreads, 0, stream,
                    static_cast<const uint8_t*>(matrix.panels), kernels::panel_bytes(kFormat, matrix.columns),
                    matrix.rows, matrix.columns, matrix.out, matrix.is_bf16);
  });
  return result;
}

}  // namespace twofold::cuda
