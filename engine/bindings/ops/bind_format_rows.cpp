// Matrices from one form to another: float32 as rows of a weight format (`twofold quantize`), rows as panels.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "ops/bind_ops.h"
#include "ops/format_rows.h"
#include "pool_view.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style>;

void expect_columns(kernels::WeightFormat format, int64_t columns) {
  const kernels::FormatLayout& layout = kernels::layout_of(format);
  if (columns <= 0 || !kernels::columns_fit(format, columns)) {
    const std::string most =
        layout.row_head_bytes == 0 ? "" : ", at most " + std::to_string(kernels::kMostChannelColumns);
    throw KernelFailure("a row of " + std::to_string(columns) + " columns in format " + layout.name +
                        "; expected a multiple of " + std::to_string(layout.block_columns) + most);
  }
}

Bytes quantise(const PoolView& pool, const py::array& x, const std::string& name,
               const std::optional<py::array>& importance) {
  const kernels::WeightFormat format = format_named(name);
  if (!kernels::layout_of(format).quantised) throw ConfigFailure("weights are never quantised to " + name);
  const TensorView view = view_of(x);
  const float* weights = expect_f32(view, "quantise_rows: x", {kAny, kAny});
  const int64_t rows = view.shape[0], columns = view.shape[1];
  expect_columns(format, columns);
  const float* errors =
      importance ? expect_f32(view_of(*importance), "quantise_rows: importance", {columns}) : nullptr;
  Bytes out({rows, static_cast<py::ssize_t>(kernels::source_row_bytes(format, columns))});
  uint8_t* to = out.mutable_data();
  const py::gil_scoped_release release;
  quantise_rows(pool, format, weights, errors, rows, columns, to);
  return out;
}

Bytes panels_of(const py::object& matrix) {
  const SourceMatrix source = source_matrix(matrix, "pack_panels: matrix");
  const int64_t panels = kernels::num_panels(source.rows);
  Bytes packed(panels * kernels::panel_bytes(source.format, source.columns));
  auto* to = reinterpret_cast<std::byte*>(packed.mutable_data());
  const py::gil_scoped_release release;
  pack_panels(source, 0, panels, to);
  return packed;
}

void check_finite(const PoolView& pool, const py::object& matrix) {
  const SourceMatrix source = source_matrix(matrix, "expect_finite: matrix");
  const py::gil_scoped_release release;
  try {
    expect_finite(pool, source);
  } catch (const std::invalid_argument& wrong) {
    throw KernelFailure(wrong.what());
  }
}

py::dict weight_formats() {
  py::dict formats;
  for (const kernels::FormatLayout& layout : kernels::kFormatLayouts) {
    formats[layout.name] = py::make_tuple(layout.block_columns, layout.block_bytes, layout.panel_columns,
                                          layout.panel_block_bytes, layout.scale_grid, layout.row_head_bytes,
                                          layout.gguf, layout.quantised);
  }
  return formats;
}

}  // namespace

void bind_format_rows(py::module_& m) {
  m.def("weight_formats", &weight_formats,
        "Fields of FormatLayout by the format's name, in the order of the registry.");
  m.def("quantise_rows", &quantise, py::arg("pool"), py::arg("x"), py::arg("format"),
        py::arg("importance") = py::none(), "float32 [rows, columns] as uint8 [rows, bytes of a row].");
  m.def("pack_panels", &panels_of, py::arg("matrix"),
        "A WeightMatrix as the kernels read it: uint8 [bytes]. ValueError for a NaN or an infinity.");
  m.def("expect_finite", &check_finite, py::arg("pool"), py::arg("matrix"),
        "KernelError for a WeightMatrix that holds a NaN or an infinity.");
}

}  // namespace twofold::bindings
