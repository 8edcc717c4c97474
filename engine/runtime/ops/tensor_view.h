// Argument of an operation: a pointer with its element type and shape, and the checks that make it safe to use.
//
// Framework-free: the bindings fill a TensorView from a numpy array; nothing here owns memory.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "twofold/kernels.h"

namespace twofold {

// A tensor does not fit its operation, or a value in it is out of range. The message states the actual and the
// expected values. Python sees twofold.api.errors.KernelError.
class KernelFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// kU16 holds bfloat16 bits wherever a weight is expected. The last three are never accepted, only named in
// messages.
enum class ElementType : uint8_t { kF32, kU16, kI32, kF64, kI64, kOther };

struct TensorView {
  static constexpr int kMaxDims = 4;

  void* data = nullptr;
  ElementType type = ElementType::kOther;
  int num_dims = 0;
  int64_t shape[kMaxDims] = {};
  bool contiguous = false;  // C order, aligned to its element type, native byte order
  bool writable = false;
};

// A row-major matrix [rows, cols] of plain elements: a router's gate, or a kernel's argument.
struct Weight {
  const void* data = nullptr;
  kernels::DType dtype = kernels::DType::kF32;
  int64_t rows = 0, cols = 0;

  const void* row(int64_t r) const {
    return static_cast<const char*>(data) + r * cols * kernels::element_bytes(dtype);
  }
};

// One row-major product of the table, by the matrix's type, on rows [first, first + count) of it.
inline void matmul_rows(const kernels::KernelTable& table, const float* x, const Weight& w, int64_t first,
                        int count, float* y, int64_t ldy, int M) {
  const int K = static_cast<int>(w.cols);
  table.rows_of(w.dtype).matmul(x, K, w.row(first), y, ldy, M, count, K);
}

inline constexpr int64_t kAny = -1;  // in an expected shape: any length
enum class Access : uint8_t { kRead, kWrite };

// "float32 (3, 256)", for messages.
std::string describe(const TensorView& view);

// Each checks type, shape and layout, and throws KernelFailure naming `what` (for example "LmHead.forward:
// logits").
const float* expect_f32(const TensorView& view, const char* what, std::initializer_list<int64_t> shape);
float* expect_writable_f32(const TensorView& view, const char* what, std::initializer_list<int64_t> shape);
const int32_t* expect_i32(const TensorView& view, const char* what, std::initializer_list<int64_t> shape);
int32_t* expect_writable_i32(const TensorView& view, const char* what, std::initializer_list<int64_t> shape);
// float32, or uint16 holding bfloat16 bits; two-dimensional.
Weight expect_weight(const TensorView& view, const char* what, int64_t rows, int64_t cols);

}  // namespace twofold
