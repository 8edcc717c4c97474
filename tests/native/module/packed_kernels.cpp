// Weight formats and single kernels of packed weights, so that one process can test and measure every level
// its CPU has. The engine does not come this way.
#include "twofold/packed_kernels.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "../source_scales.h"
#include "tensor_arguments.h"
#include "tested.h"
#include "twofold/rounding.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style>;
using Halves = py::array_t<uint16_t, py::array::c_style>;

constexpr const char* kKindNames[kernels::kNumActivationKinds] = {"f32", "bf16", "q8", "q8_token"};

kernels::ActivationKind kind_named(const std::string& name) {
  for (int k = 0; k < kernels::kNumActivationKinds; ++k) {
    if (name == kKindNames[k]) return static_cast<kernels::ActivationKind>(k);
  }
  throw ConfigFailure("activation kind \"" + name + "\" does not exist");
}

// Bytes on a cache line of their own.
Bytes aligned_bytes(std::vector<py::ssize_t> shape) {
  size_t count = 64;
  for (const py::ssize_t n : shape) count *= static_cast<size_t>(n);
  void* memory = std::aligned_alloc(64, (count + 63) / 64 * 64);
  if (memory == nullptr) throw std::bad_alloc();
  return Bytes(std::move(shape), static_cast<uint8_t*>(memory),
               py::capsule(memory, [](void* p) { std::free(p); }));
}

// The source rows of a matrix, checked against its format.
struct Source {
  std::vector<const void*> rows;
  std::vector<const void*> scales;

  Source(const Bytes& bytes, kernels::WeightFormat format, int64_t columns,
         const std::optional<Floats>& grid) {
    const kernels::FormatLayout& layout = kernels::layout_of(format);
    if (!kernels::columns_fit(format, columns) || bytes.ndim() != 2 ||
        bytes.shape(1) != kernels::source_row_bytes(format, columns)) {
      throw KernelFailure(std::string("rows of ") + layout.name + " with " + std::to_string(columns) +
                          " columns do not have this shape");
    }
    const int64_t side = layout.scale_grid;  // 0: no scales apart
    if ((side > 0) != grid.has_value() ||
        (side > 0 && (grid->ndim() != 2 || grid->shape(0) * side < bytes.shape(0) ||
                      grid->shape(1) != (columns + side - 1) / side))) {
      throw KernelFailure("fp8 rows need f32 scales for 128 x 128 weights, others none");
    }
    for (py::ssize_t r = 0; r < bytes.shape(0); ++r) {
      rows.push_back(bytes.data(r, 0));
      scales.push_back(side > 0 ? grid->data(r / side, 0) : nullptr);
    }
  }
};

Bytes pack(const Bytes& rows, const std::string& name, int64_t columns, const std::optional<Floats>& grid) {
  const kernels::WeightFormat format = format_named(name);
  const Source source(rows, format, columns, grid);
  const int64_t N = rows.shape(0), each = kernels::panel_bytes(format, columns);
  Bytes packed = aligned_bytes({kernels::num_panels(N), each});
  uint8_t* to = packed.mutable_data();
  const py::gil_scoped_release release;
  for (int64_t n = 0; n < N; n += kernels::kPanelRows) {
    const int here = static_cast<int>(N - n < kernels::kPanelRows ? N - n : kernels::kPanelRows);
    kernels::pack_panel(format, source.rows.data() + n, grid.has_value() ? source.scales.data() + n : nullptr,
                        here, columns, to + n / kernels::kPanelRows * each);
  }
  return packed;
}

Floats dequantise(const Bytes& rows, const std::string& name, int64_t columns,
                  const std::optional<Floats>& grid) {
  const kernels::WeightFormat format = format_named(name);
  const Source source(rows, format, columns, grid);
  Floats out({rows.shape(0), static_cast<py::ssize_t>(columns)});
  for (py::ssize_t r = 0; r < rows.shape(0); ++r) {
    kernels::dequantise_row(format, source.rows[r], source.scales[r], columns, out.mutable_data(r, 0));
  }
  return out;
}

void expect_panels(const Bytes& packed, kernels::WeightFormat format, int64_t rows, int64_t columns) {
  if (packed.nbytes() != kernels::packed_bytes(format, rows, columns)) {
    throw KernelFailure("packed weights have " + std::to_string(packed.nbytes()) + " bytes; expected " +
                        std::to_string(kernels::packed_bytes(format, rows, columns)));
  }
}

Floats unpack(const Bytes& packed, const std::string& name, int64_t rows, int64_t columns,
              const std::optional<std::string>& level) {
  const kernels::WeightFormat format = format_named(name);
  expect_panels(packed, format, rows, columns);
  if (level) {
    Floats panels({kernels::num_panels(rows) * kernels::kPanelRows, columns});
    for (int64_t p = 0; p < kernels::num_panels(rows); ++p)
      level_named(*level).unpack_panel(format, packed.data() + p * kernels::panel_bytes(format, columns),
                                       columns, panels.mutable_data(p * kernels::kPanelRows, 0));
    return panels;
  }
  Floats out({rows, columns});
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* panel = packed.data() + r / kernels::kPanelRows * kernels::panel_bytes(format, columns);
    kernels::unpack_row(format, panel, static_cast<int>(r % kernels::kPanelRows), columns,
                        out.mutable_data(r, 0));
  }
  return out;
}

// Rows of activations in an encoding, `stride` bytes apart. `parts`: the ends of the column ranges that are
// encoded one after the other (the last is K).
Bytes encode(const Floats& x, const std::string& kind_name, const std::string& level,
             const std::optional<std::vector<int>>& parts, std::optional<int64_t> stride) {
  const kernels::ActivationKind kind = kind_named(kind_name);
  if (x.ndim() != 2) throw KernelFailure("kernels.encode: x is not two-dimensional");
  const int M = static_cast<int>(x.shape(0)), K = static_cast<int>(x.shape(1));
  const int64_t row_bytes = stride.value_or(kernels::activation_row_stride(kind, K));
  Bytes rows = aligned_bytes({M, row_bytes});
  std::fill_n(rows.mutable_data(), rows.nbytes(), uint8_t{0xee});
  int first = 0;
  for (const int end : parts.value_or(std::vector<int>{K})) {
    level_named(level).encode_as(kind)(x.data() + first, K, rows.mutable_data(), row_bytes, M, first,
                                       end - first, K);
    first = end;
  }
  return rows;
}

// y = x w^T for y's rows and columns; x as encode() made it.
void packed_matmul(const Bytes& x, const Bytes& packed, const std::string& name, int64_t columns,
                   const py::array& y, const std::string& level) {
  const kernels::WeightFormat format = format_named(name);
  const kernels::FormatKernels& kernel = level_named(level).of(format);
  const TensorView ys = view_of(y);
  if (x.ndim() != 2 || ys.num_dims != 2 ||
      x.shape(1) < kernels::activation_row_bytes(kernel.activation, columns)) {
    throw KernelFailure("kernels.packed_matmul: x are not encoded rows of this length");
  }
  float* out = expect_writable_f32(ys, "kernels.packed_matmul: y", {x.shape(0), kAny});
  expect_panels(packed, format, ys.shape[1], columns);
  const void *rows = x.data(), *panels = packed.data();
  const int64_t row_bytes = x.shape(1);
  const int M = static_cast<int>(x.shape(0)), N = static_cast<int>(ys.shape[1]);
  const py::gil_scoped_release release;
  kernel.matmul(rows, row_bytes, panels, out, N, M, N, static_cast<int>(columns));
}

// One expert, as the engine runs it on one thread: y = down(silu(gate(x)) * up(x)), gate and up panel by
// panel, 32 columns of their product encoded at once (q8_token: all columns at the end).
void expert(const Floats& x, const Bytes& gate, const Bytes& up, const Bytes& down, const std::string& name,
            int intermediate, const py::array& y, const std::string& level) {
  const kernels::WeightFormat format = format_named(name);
  const kernels::KernelTable& table = level_named(level);
  const kernels::FormatKernels& kernel = table.of(format);
  if (x.ndim() != 2) throw KernelFailure("kernels.expert: x is not two-dimensional");
  const int M = static_cast<int>(x.shape(0)), hidden = static_cast<int>(x.shape(1));
  float* out = expect_writable_f32(view_of(y), "kernels.expert: y", {M, hidden});
  expect_panels(gate, format, intermediate, hidden);
  expect_panels(up, format, intermediate, hidden);
  expect_panels(down, format, hidden, intermediate);
  const int64_t x_bytes = kernels::activation_row_stride(kernel.activation, hidden);
  const int64_t h_bytes = kernels::activation_row_stride(kernel.activation, intermediate);
  const int64_t each = kernels::panel_bytes(format, hidden);
  constexpr int kRows = kernels::kPanelRows;
  const bool whole_rows = kernel.activation == kernels::ActivationKind::kQ8Token;
  const int width = whole_rows ? static_cast<int>(kernels::num_panels(intermediate)) * kRows : kRows;
  thread_local std::vector<char> memory;
  memory.resize(static_cast<size_t>(M * (x_bytes + h_bytes + 4 * (width + kRows)) + 64));
  char* encoded = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  char* inner = encoded + M * x_bytes;
  float* gated = reinterpret_cast<float*>(inner + M * h_bytes);
  float* upped = gated + M * width;
  const py::gil_scoped_release release;
  const kernels::EncodeFunction encode_rows = table.encode_as(kernel.activation);
  const kernels::GatedActivation silu = table.gated_as(kernels::ExpertActivation::kSilu);
  encode_rows(x.data(), hidden, encoded, x_bytes, M, 0, hidden, hidden);
  for (int n = 0; n < intermediate; n += kRows) {
    const int rows = std::min(kRows, intermediate - n);
    float* const h = whole_rows ? gated + n : gated;
    kernel.matmul(encoded, x_bytes, gate.data() + n / kRows * each, h, width, M, rows, hidden);
    kernel.matmul(encoded, x_bytes, up.data() + n / kRows * each, upped, kRows, M, rows, hidden);
    if (whole_rows) {
      for (int m = 0; m < M; ++m) silu(h + m * width, upped + m * kRows, h + m * width, rows, 0);
      continue;
    }
    silu(gated, upped, gated, M * kRows, 0);
    encode_rows(gated, kRows, inner, h_bytes, M, n, rows, intermediate);
  }
  if (whole_rows) encode_rows(gated, width, inner, h_bytes, M, 0, intermediate, intermediate);
  kernel.matmul(inner, h_bytes, down.data(), out, hidden, M, hidden, intermediate);
}

void gated(const py::array& gate, const py::array& up, const py::array& h, const std::string& activation,
           float limit, const std::string& level) {
  const TensorView view = view_of(gate);
  const float* g = expect_f32(view, "kernels.gated: gate", {kAny});
  const int64_t n = view.shape[0];
  level_named(level).gated_as(kernels::expert_activation_named(activation))(
      g, expect_f32(view_of(up), "kernels.gated: up", {n}),
      expect_writable_f32(view_of(h), "kernels.gated: h", {n}), static_cast<int>(n), limit);
}

// Writes scales and minima [blocks, 2], the bits of f16 numbers, into source blocks [blocks, bytes].
void put_scales(Bytes blocks, const std::string& name, const Halves& numbers) {
  const kernels::WeightFormat format = format_named(name);
  if (blocks.ndim() != 2 || blocks.shape(1) != kernels::layout_of(format).block_bytes ||
      numbers.ndim() != 2 || numbers.shape(0) != blocks.shape(0) || numbers.shape(1) != 2)
    throw KernelFailure("blocks of " + name + " and their scales do not have these shapes");
  kernels::with_format(format, [&]<class Format>(Format) {
    for (py::ssize_t b = 0; b < blocks.shape(0); ++b)
      test::put_scales<Format>(blocks.mutable_data(b, 0), numbers.at(b, 0), numbers.at(b, 1));
  });
}

}  // namespace

void bind_packed_kernels(py::module_& m) {
  m.def("put_scales", &put_scales, py::arg("blocks").noconvert(), py::arg("format"), py::arg("numbers"),
        "Writes the f16 scale and minimum of source blocks; all other bytes may be anything.");
  m.def(
      "format_kernel",
      [](const std::string& level, const std::string& format) {
        const kernels::FormatKernels& kernel = level_named(level).of(format_named(format));
        return std::make_pair(kKindNames[static_cast<int>(kernel.activation)], kernel.level);
      },
      py::arg("level"), py::arg("format"),
      "The activation kind a level takes for a format, and whose kernel it is.");
  m.def(
      "device_activation",
      [](const std::string& format) {
        return kKindNames[static_cast<int>(kernels::device_activation(format_named(format)))];
      },
      py::arg("format"), "What a device's decode kernels multiply a format with (rounding.h).");
  m.def(
      "inner_activation",
      [](const std::string& level, const std::string& down, bool beside_device) {
        const kernels::WeightFormat format = format_named(down);
        const auto rounding = beside_device ? kernels::Rounding::kOfDevice : kernels::Rounding::kOfLevel;
        return kKindNames[static_cast<int>(
            kernels::inner_activation(level_named(level).of(format).activation, format, rounding))];
      },
      py::arg("level"), py::arg("down"), py::arg("beside_device"),
      "What the CPU rounds to between an expert's two products (rounding.h).");
  m.def("pack", &pack, py::arg("rows"), py::arg("format"), py::arg("columns"),
        py::arg("scales") = py::none());
  m.def("dequantise", &dequantise, py::arg("rows"), py::arg("format"), py::arg("columns"),
        py::arg("scales") = py::none());
  m.def("unpack", &unpack, py::arg("packed"), py::arg("format"), py::arg("rows"), py::arg("columns"),
        py::kw_only(), py::arg("level") = py::none(),
        "Row by row; with a level all rows of its panels at once.");
  m.def("encode", &encode, py::arg("x"), py::arg("kind"), py::kw_only(), py::arg("level"),
        py::arg("parts") = py::none(), py::arg("stride") = py::none());
  m.def("packed_matmul", &packed_matmul, py::arg("x"), py::arg("packed"), py::arg("format"),
        py::arg("columns"), py::arg("y"), py::kw_only(), py::arg("level"));
  m.def("expert", &expert, py::arg("x"), py::arg("gate"), py::arg("up"), py::arg("down"), py::arg("format"),
        py::arg("intermediate"), py::arg("y"), py::kw_only(), py::arg("level"));
  m.def("gated", &gated, py::arg("gate"), py::arg("up"), py::arg("h"), py::kw_only(), py::arg("activation"),
        py::arg("limit") = 0.0f, py::arg("level"));
}

}  // namespace twofold::bindings
