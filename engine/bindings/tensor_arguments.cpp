#include "tensor_arguments.h"

#include <algorithm>
#include <bit>

namespace py = pybind11;

namespace twofold::bindings {
namespace {

void raise_as(const char* name, const std::exception& failure) {
  const py::object type = py::module_::import("twofold.errors").attr(name);
  PyErr_SetString(type.ptr(), failure.what());
}

ElementType element_type(const py::dtype& dtype) {
  const char kind = dtype.kind();
  const py::ssize_t size = dtype.itemsize();
  if (kind == 'f' && size == 4) return ElementType::kF32;
  if (kind == 'u' && size == 2) return ElementType::kU16;
  if (kind == 'i' && size == 4) return ElementType::kI32;
  if (kind == 'f' && size == 8) return ElementType::kF64;
  if (kind == 'i' && size == 8) return ElementType::kI64;
  return ElementType::kOther;
}

}  // namespace

void register_failures() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const KernelFailure& failure) {
      raise_as("KernelError", failure);
    } catch (const ConfigFailure& failure) {
      raise_as("ConfigError", failure);
    }
  });
}

TensorView view_of(const py::array& array) {
  TensorView view;
  const py::dtype dtype = array.dtype();
  view.type = element_type(dtype);
  view.num_dims = static_cast<int>(array.ndim());
  std::copy_n(array.shape(), std::min(view.num_dims, TensorView::kMaxDims), view.shape);
  const int flags = array.flags();
  const bool native = dtype.byteorder() != (std::endian::native == std::endian::little ? '>' : '<');
  view.contiguous =
      (flags & py::array::c_style) != 0 && (flags & py::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0 && native;
  view.writable = (flags & py::detail::npy_api::NPY_ARRAY_WRITEABLE_) != 0;
  view.data = const_cast<void*>(array.data());
  return view;
}

}  // namespace twofold::bindings
