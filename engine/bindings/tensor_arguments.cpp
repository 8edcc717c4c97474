#include "tensor_arguments.h"

#include <algorithm>
#include <bit>

#include "host/ranks.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

void raise_as(const char* name, const std::exception& failure) {
  const py::object type = py::module_::import("twofold.api.errors").attr(name);
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
    } catch (const RankFailure& failure) {
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

kernels::WeightFormat format_named(const std::string& name) {
  for (int f = 0; f < kernels::kNumWeightFormats; ++f) {
    if (name == kernels::kFormatLayouts[f].name) return static_cast<kernels::WeightFormat>(f);
  }
  throw ConfigFailure("weight format \"" + name + "\" does not exist");
}

SourceMatrix source_matrix(const py::handle& matrix, const std::string& what) {
  if (!py::hasattr(matrix, "data") || !py::hasattr(matrix, "format") || !py::hasattr(matrix, "columns") ||
      !py::hasattr(matrix, "scales")) {
    throw KernelFailure(what + " is a " + std::string(py::str(py::type::handle_of(matrix).attr("__name__"))) +
                        "; expected a WeightMatrix");
  }
  const py::array data = matrix.attr("data");
  SourceMatrix source{format_named(py::str(matrix.attr("format"))),
                      static_cast<const std::byte*>(data.data()), 0, matrix.attr("columns").cast<int64_t>(),
                      0};
  const kernels::FormatLayout& layout = kernels::layout_of(source.format);
  const py::object scales = matrix.attr("scales");
  const bool separate = layout.separate_bytes != 0 && !scales.is_none();
  const int64_t row_bytes = separate ? source.columns / layout.block_columns * layout.separate_bytes
                                     : kernels::source_row_bytes(source.format, source.columns);
  const bool fits = data.ndim() == 2 && source.columns > 0 &&
                    kernels::columns_fit(source.format, source.columns) &&
                    data.shape(1) * data.itemsize() == row_bytes &&
                    (data.shape(1) == 1 || data.strides(1) == data.itemsize());
  if (!fits) {
    throw KernelFailure(what + " is " + describe(view_of(data)) + "; expected contiguous rows of " +
                        std::to_string(source.columns) + " columns in format " + layout.name);
  }
  source.rows = data.shape(0);
  source.row_stride = data.strides(0);
  if (separate) {
    const py::array_t<uint8_t> bytes = py::reinterpret_borrow<py::array>(scales);
    const int64_t blocks = source.columns / layout.block_columns;
    if (!py::isinstance<py::array_t<uint8_t>>(scales) || bytes.ndim() != 2 || bytes.shape(0) != source.rows ||
        bytes.shape(1) != blocks || (blocks > 1 && bytes.strides(1) != 1))
      throw KernelFailure(what + " has scales " + describe(view_of(bytes)) + "; expected one byte for " +
                          std::to_string(layout.block_columns) + " columns of a row");
    source.scales = reinterpret_cast<const std::byte*>(bytes.data());
    source.scale_stride = bytes.strides(0);
    return source;
  }
  const int64_t side = layout.scale_grid;
  if (side == 0) return source;
  if (scales.is_none() || !py::isinstance<py::array_t<float>>(scales))
    throw KernelFailure(what + " is " + layout.name + " without float32 scales");
  const auto grid = py::reinterpret_borrow<py::array>(scales);
  const int64_t item = static_cast<int64_t>(sizeof(float));
  const bool by_row = grid.ndim() == 2 && grid.shape(0) == source.rows;  // with one row both are the same
  if (grid.ndim() != 2 || (!by_row && grid.shape(0) != (source.rows + side - 1) / side) ||
      grid.shape(1) != (source.columns + side - 1) / side || (grid.shape(1) > 1 && grid.strides(1) != item) ||
      grid.strides(0) % item != 0) {
    throw KernelFailure(what + " has scales " + describe(view_of(grid)) +
                        "; expected one for 128 x 128 weights, or for 128 of a row");
  }
  source.scales = static_cast<const std::byte*>(grid.data());
  source.scale_stride = grid.strides(0);
  source.scale_rows = by_row ? 1 : side;
  return source;
}

}  // namespace twofold::bindings
