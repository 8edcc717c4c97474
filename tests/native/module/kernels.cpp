// Single kernels of a named level, so that one process can test and measure all levels its CPU has. The
// engine does not come this way.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>

#include "host/thread_pool.h"
#include "levels.h"
#include "pool_view.h"
#include "tensor_arguments.h"
#include "tested.h"

namespace py = pybind11;

namespace twofold::bindings {

namespace {

constexpr const char* kEmulatedAmx = "amx_emulated";

// The amx level with its tile instructions carried out in plain code; null without AVX-512 and VNNI.
const kernels::KernelTable* emulated_amx() {
  static const kernels::KernelTable* const table = []() -> const kernels::KernelTable* {
    const kernels::KernelTable* below = kernels::table_for_level("avx512_vnni");
    const kernels::KernelTable* part = below == nullptr ? nullptr : kernels::amx_emulated();
    if (part == nullptr) return nullptr;
    static kernels::KernelTable composed = *below;
    composed.name = kEmulatedAmx;
    kernels::add_part(*part, kEmulatedAmx, composed);
    return &composed;
  }();
  return table;
}

}  // namespace

const kernels::KernelTable& level_named(const std::string& level) {
  const kernels::KernelTable* table =
      level == kEmulatedAmx ? emulated_amx() : kernels::table_for_level(level.c_str());
  if (table != nullptr) return *table;
  throw ConfigFailure("kernel level \"" + level +
                      "\" does not exist, this CPU cannot run it or it was not compiled");
}

namespace {

int to_int(int64_t n) { return static_cast<int>(n); }

// A matrix of any DType: int8 of whole numbers, uint8 of FP8, and what `expect_weight` takes.
Weight expect_rows(const py::array& w, const char* what, int64_t rows, int64_t cols) {
  const bool i8 = w.dtype().kind() == 'i', fp8 = w.dtype().kind() == 'u';
  if (w.itemsize() != 1 || (!i8 && !fp8)) return expect_weight(view_of(w), what, rows, cols);
  if (w.ndim() != 2 || (w.flags() & py::array::c_style) == 0 || (rows != kAny && w.shape(0) != rows) ||
      (cols != kAny && w.shape(1) != cols)) {
    throw KernelFailure(std::string(what) + " does not fit");
  }
  return {w.data(), i8 ? kernels::DType::kI8 : kernels::DType::kFP8, w.shape(0), w.shape(1)};
}

// A three-operand kernel by weight type.
void matmul(const py::array& x, const py::array& w, const py::array& y, const std::string& level) {
  const TensorView xs = view_of(x);
  const float* rows = expect_f32(xs, "kernels.matmul: x", {kAny, kAny});
  const Weight weight = expect_rows(w, "kernels.matmul: w", kAny, xs.shape[1]);
  float* out = expect_writable_f32(view_of(y), "kernels.matmul: y", {xs.shape[0], weight.rows});
  const kernels::KernelTable& table = level_named(level);
  const py::gil_scoped_release release;
  matmul_rows(table, rows, weight, 0, to_int(weight.rows), out, weight.rows, to_int(xs.shape[0]));
}

void weighted_sum(const py::array& p, const py::array& v, const py::array& out, const std::string& level) {
  const TensorView ps = view_of(p);
  const float* weights = expect_f32(ps, "kernels.weighted_sum: p", {kAny, kAny});
  const Weight values = expect_rows(v, "kernels.weighted_sum: v", ps.shape[1], kAny);
  float* sums = expect_writable_f32(view_of(out), "kernels.weighted_sum: out", {ps.shape[0], values.cols});
  const kernels::KernelTable& table = level_named(level);
  const int M = to_int(ps.shape[0]), n = to_int(ps.shape[1]), D = to_int(values.cols);
  table.rows_of(values.dtype).weighted_sum(weights, n, values.data, sums, D, M, n, D);
}

void rmsnorm(const py::array& x, const py::array& w, float eps, const py::array& y,
             const std::string& level) {
  const TensorView xs = view_of(x);
  const float* row = expect_f32(xs, "kernels.rmsnorm: x", {kAny});
  const int64_t n = xs.shape[0];
  level_named(level).rmsnorm(row, expect_f32(view_of(w), "kernels.rmsnorm: w", {n}), eps,
                             expect_writable_f32(view_of(y), "kernels.rmsnorm: y", {n}), to_int(n));
}

void rope(const py::array& v, const py::array& cosine, const py::array& sine, const std::string& level) {
  const TensorView angles = view_of(cosine);
  const float* c = expect_f32(angles, "kernels.rope: cosine", {kAny});
  const int64_t half = angles.shape[0];
  const TensorView vs = view_of(v);
  float* row = expect_writable_f32(vs, "kernels.rope: v", {kAny});
  if (vs.shape[0] < 2 * half) throw KernelFailure("kernels.rope: v is shorter than twice the cosines");
  level_named(level).rope(row, c, expect_f32(view_of(sine), "kernels.rope: sine", {half}), to_int(half));
}

std::pair<float, float> softmax_exp(const py::array& s, float scale, const std::string& level) {
  const TensorView view = view_of(s);
  float* row = expect_writable_f32(view, "kernels.softmax_exp: s", {kAny});
  if (view.shape[0] < 1) throw KernelFailure("kernels.softmax_exp: s is empty");
  const auto [peak, total] = level_named(level).softmax_exp(row, to_int(view.shape[0]), scale);
  return {peak, total};
}

void axpy(float alpha, const py::array& x, const py::array& y, const std::string& level) {
  const TensorView view = view_of(x);
  const float* row = expect_f32(view, "kernels.axpy: x", {kAny});
  level_named(level).axpy(alpha, row, expect_writable_f32(view_of(y), "kernels.axpy: y", {view.shape[0]}),
                          to_int(view.shape[0]));
}

py::array_t<float> relu_sum(const py::array& x, const py::array& w, const std::string& level) {
  const TensorView view = view_of(x);
  const float* rows = expect_f32(view, "kernels.relu_sum: x", {kAny, kAny});
  py::array_t<float> out(view.shape[1]);
  level_named(level).relu_sum(rows, view.shape[1],
                              expect_f32(view_of(w), "kernels.relu_sum: w", {view.shape[0]}),
                              out.mutable_data(), to_int(view.shape[0]), to_int(view.shape[1]));
  return out;
}

py::array_t<uint16_t> f32_to_bf16(const py::array& x, const std::string& level) {
  const TensorView view = view_of(x);
  const float* row = expect_f32(view, "kernels.f32_to_bf16: x", {kAny});
  py::array_t<uint16_t> out(view.shape[0]);
  level_named(level).f32_to_bf16(row, out.mutable_data(), view.shape[0]);
  return out;
}

py::array_t<float> bf16_to_f32(const py::array_t<uint16_t, py::array::c_style>& x, const std::string& level) {
  py::array_t<float> out(x.size());
  level_named(level).bf16_to_f32(x.data(), out.mutable_data(), x.size());
  return out;
}

py::array_t<float> widen(const py::array& x, const std::string& level) {
  const Weight rows = expect_rows(x, "kernels.widen: x", kAny, kAny);
  py::array_t<float> out({rows.rows, rows.cols});
  level_named(level).rows_of(rows.dtype).widen(rows.data, out.mutable_data(), rows.rows * rows.cols);
  return out;
}

std::pair<py::array_t<int8_t>, float> f32_to_i8(const py::array& x, const std::string& level) {
  const TensorView view = view_of(x);
  const float* row = expect_f32(view, "kernels.f32_to_i8: x", {kAny});
  py::array_t<int8_t> out(view.shape[0]);
  const float scale = level_named(level).f32_to_i8(row, out.mutable_data(), to_int(view.shape[0]));
  return {out, scale};
}

py::array_t<uint8_t> f32_to_fp8(const py::array& x, const std::string& level) {
  const TensorView view = view_of(x);
  const float* row = expect_f32(view, "kernels.f32_to_fp8: x", {kAny});
  py::array_t<uint8_t> out(view.shape[0]);
  level_named(level).f32_to_fp8(row, out.mutable_data(), to_int(view.shape[0]));
  return out;
}

uint64_t read_all(const py::array& memory, const std::string& level) {
  if (!view_of(memory).contiguous) throw KernelFailure("kernels.read_all: memory is not C-contiguous");
  const kernels::KernelTable& table = level_named(level);
  const void* data = memory.data();
  const int64_t bytes = memory.nbytes();
  const py::gil_scoped_release release;
  return table.read_all(data, bytes);
}

// Exercises a pool: adds one to each of num_chunks counters, `repeats` times; throws in chunk `fail_at` of
// the first.
py::array_t<int64_t> count_chunks(const PoolView& pool, int64_t num_chunks, int repeats,
                                  std::optional<int64_t> fail_at) {
  py::array_t<int64_t> counts(num_chunks);
  int64_t* count = counts.mutable_data();
  std::fill_n(count, num_chunks, int64_t{0});
  const py::gil_scoped_release release;
  for (int i = 0; i < repeats; ++i) {
    pool.threads().parallel_for(num_chunks, [&](int64_t chunk, int thread) {
      if (thread < 0 || thread >= pool.threads().num_threads())
        throw KernelFailure("thread number out of range");
      if (fail_at && chunk == *fail_at) throw KernelFailure("chunk " + std::to_string(chunk) + " must fail");
      ++count[chunk];
    });
  }
  return counts;
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("levels", [] {
    py::list names;
    for (const char* const* name = kernels::level_names(); *name != nullptr; ++name) names.append(*name);
    return names;
  });
  m.def("supported_levels", [] {
    py::list names;
    for (const char* const* name = kernels::level_names(); *name != nullptr; ++name) {
      if (kernels::table_for_level(*name) != nullptr) names.append(*name);
    }
    return names;
  });
  m.def("matmul", &matmul, py::arg("x"), py::arg("w"), py::arg("y"), py::kw_only(), py::arg("level"));
  m.def("weighted_sum", &weighted_sum, py::arg("p"), py::arg("v"), py::arg("out"), py::kw_only(),
        py::arg("level"));
  m.def("rmsnorm", &rmsnorm, py::arg("x"), py::arg("w"), py::arg("eps"), py::arg("y"), py::kw_only(),
        py::arg("level"));
  m.def("rope", &rope, py::arg("v"), py::arg("cosine"), py::arg("sine"), py::kw_only(), py::arg("level"));
  m.def("softmax_exp", &softmax_exp, py::arg("s"), py::arg("scale"), py::kw_only(), py::arg("level"));
  m.def("relu_sum", &relu_sum, py::arg("x"), py::arg("w"), py::kw_only(), py::arg("level"));
  m.def("axpy", &axpy, py::arg("alpha"), py::arg("x"), py::arg("y"), py::kw_only(), py::arg("level"));
  m.def("f32_to_bf16", &f32_to_bf16, py::arg("x"), py::kw_only(), py::arg("level"));
  m.def("bf16_to_f32", &bf16_to_f32, py::arg("x"), py::kw_only(), py::arg("level"));
  m.def("widen", &widen, py::arg("x"), py::kw_only(), py::arg("level"));
  m.def("f32_to_i8", &f32_to_i8, py::arg("x"), py::kw_only(), py::arg("level"));
  m.def("f32_to_fp8", &f32_to_fp8, py::arg("x"), py::kw_only(), py::arg("level"));
  m.def("read_all", &read_all, py::arg("memory"), py::kw_only(), py::arg("level"));
  m.def("count_chunks", &count_chunks, py::arg("pool"), py::arg("num_chunks"), py::arg("repeats") = 1,
        py::arg("fail_at") = py::none());
}

}  // namespace twofold::bindings
