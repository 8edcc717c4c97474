#include "ops/tensor_view.h"

namespace twofold {
namespace {

const char* type_name(ElementType type) {
  switch (type) {
    case ElementType::kF32:
      return "float32";
    case ElementType::kU16:
      return "uint16";
    case ElementType::kI32:
      return "int32";
    case ElementType::kF64:
      return "float64";
    case ElementType::kI64:
      return "int64";
    case ElementType::kOther:
      break;
  }
  return "another element type";
}

std::string shape_text(const int64_t* shape, int num_dims) {
  std::string text = "(";
  for (int i = 0; i < num_dims; ++i) {
    text += (i == 0 ? "" : ", ") + (shape[i] == kAny ? std::string("any") : std::to_string(shape[i]));
  }
  return text + (num_dims == 1 ? ",)" : ")");
}

bool fits(const TensorView& view, std::initializer_list<int64_t> shape) {
  if (view.num_dims != static_cast<int>(shape.size())) return false;
  const int64_t* actual = view.shape;
  for (const int64_t expected : shape) {
    if (expected != kAny && expected != *actual) return false;
    ++actual;
  }
  return true;
}

[[noreturn]] void refuse(const TensorView& view, const char* what, const char* type,
                         std::initializer_list<int64_t> shape) {
  throw KernelFailure(std::string(what) + " is " + describe(view) + "; expected " + type + " " +
                      shape_text(shape.begin(), static_cast<int>(shape.size())));
}

void check_layout(const TensorView& view, const char* what, Access access) {
  if (!view.contiguous) {
    throw KernelFailure(
        std::string(what) +
        " is not a C-contiguous, aligned array in native byte order; pass np.ascontiguousarray of it");
  }
  if (access == Access::kWrite && !view.writable) {
    throw KernelFailure(std::string(what) +
                        " is read-only, and the result is written there; pass a writable array");
  }
}

void* expect(const TensorView& view, const char* what, ElementType type, std::initializer_list<int64_t> shape,
             Access access) {
  if (view.type != type || !fits(view, shape)) refuse(view, what, type_name(type), shape);
  check_layout(view, what, access);
  return view.data;
}

}  // namespace

std::string describe(const TensorView& view) {
  if (view.num_dims > TensorView::kMaxDims) return std::to_string(view.num_dims) + "-dimensional";
  return std::string(type_name(view.type)) + " " + shape_text(view.shape, view.num_dims);
}

const float* expect_f32(const TensorView& view, const char* what, std::initializer_list<int64_t> shape) {
  return static_cast<const float*>(expect(view, what, ElementType::kF32, shape, Access::kRead));
}

float* expect_writable_f32(const TensorView& view, const char* what, std::initializer_list<int64_t> shape) {
  return static_cast<float*>(expect(view, what, ElementType::kF32, shape, Access::kWrite));
}

const int32_t* expect_i32(const TensorView& view, const char* what, std::initializer_list<int64_t> shape) {
  return static_cast<const int32_t*>(expect(view, what, ElementType::kI32, shape, Access::kRead));
}

int32_t* expect_writable_i32(const TensorView& view, const char* what, std::initializer_list<int64_t> shape) {
  return static_cast<int32_t*>(expect(view, what, ElementType::kI32, shape, Access::kWrite));
}

Weight expect_weight(const TensorView& view, const char* what, int64_t rows, int64_t cols) {
  const bool bf16 = view.type == ElementType::kU16;
  if ((!bf16 && view.type != ElementType::kF32) || !fits(view, {rows, cols})) {
    refuse(view, what, "float32, or uint16 holding bfloat16 bits,", {rows, cols});
  }
  check_layout(view, what, Access::kRead);
  return {view.data, bf16 ? kernels::DType::kBF16 : kernels::DType::kF32, view.shape[0], view.shape[1]};
}

}  // namespace twofold
