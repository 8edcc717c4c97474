// The thread pool, CPU features, and attention's arguments: cache and batch.
#include "ops/bind_ops.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host/cgroup.h"
#include "host/thread_pool.h"
#include "host/work_clock.h"
#include "module.h"
#include "ops/attention/attention_batch.h"
#include "ops/state_cache.h"
#include "pool_view.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

std::map<std::string, bool> features() {
  const kernels::CpuFeatures has = kernels::cpu_features();
  return {{"avx2", has.avx2},
          {"fma", has.fma},
          {"f16c", has.f16c},
          {"avx_vnni", has.avx_vnni},
          {"avx512f", has.avx512f},
          {"avx512bw", has.avx512bw},
          {"avx512vl", has.avx512vl},
          {"avx512dq", has.avx512dq},
          {"avx512_vnni", has.avx512_vnni},
          {"avx512_bf16", has.avx512_bf16},
          {"amx_tile", has.amx_tile},
          {"amx_int8", has.amx_int8},
          {"amx_bf16", has.amx_bf16}};
}

PoolView make_pool(int num_threads, const std::string& numa, const std::string& root) {
  try {
    return PoolView(std::make_shared<ThreadPool>(plan_pool(num_threads, numa, root)));
  } catch (const std::invalid_argument& wrong) {
    throw ConfigFailure(wrong.what());
  }
}

kernels::DType cache_dtype(const std::string& name) {
  constexpr const char* kNames[kernels::kNumDTypes] = {"float32", "bfloat16", "q8", "fp8"};
  for (int dtype = 0; dtype < kernels::kNumDTypes; ++dtype) {
    if (name == kNames[dtype]) return static_cast<kernels::DType>(dtype);
  }
  throw ConfigFailure("StateCache: dtype is \"" + name + "\"; expected float32, bfloat16, q8 or fp8");
}

// (number of planes, elements per token, type)
using PlanesArgument = std::tuple<int, int, std::string>;

std::unique_ptr<StateCache> make_cache(const std::vector<std::vector<PlanesArgument>>& layers, int num_pages,
                                       int page_size, const std::vector<int64_t>& record_bytes,
                                       int num_records) {
  std::vector<LayerState> states(layers.size());
  if (!record_bytes.empty() && record_bytes.size() != layers.size()) {
    throw ConfigFailure("StateCache: record_bytes has " + std::to_string(record_bytes.size()) +
                        " layers; expected " + std::to_string(layers.size()));
  }
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    for (const auto& [count, width, dtype] : layers[layer]) {
      states[layer].planes.push_back({count, width, cache_dtype(dtype)});
    }
    if (!record_bytes.empty()) states[layer].record_bytes = record_bytes[layer];
  }
  try {
    return std::make_unique<StateCache>(states, num_pages, page_size, num_records);
  } catch (const std::invalid_argument& wrong) {
    throw ConfigFailure(wrong.what());
  } catch (const std::bad_alloc&) {
    throw ConfigFailure("StateCache: no memory for " + std::to_string(num_pages) + " pages of " +
                        std::to_string(page_size) +
                        " positions; lower the number of pages or the context length");
  }
}

void resize_cache(StateCache& cache, int num_pages, const std::map<int, int>& kept, bool keep_records) {
  const std::vector<std::pair<int, int>> pages(kept.begin(), kept.end());
  const py::gil_scoped_release release;
  try {
    cache.resize(num_pages, pages, keep_records);
  } catch (const std::bad_alloc&) {
    throw ConfigFailure("StateCache: no memory for " + std::to_string(num_pages) + " pages of " +
                        std::to_string(cache.page_size()) + " tokens; ask for fewer");
  }
}

py::bytes bytes_of(const std::vector<std::byte>& all) {
  return py::bytes(reinterpret_cast<const char*>(all.data()), all.size());
}

std::span<const std::byte> span_of(const py::bytes& given) {
  const std::string_view view = given;
  return {reinterpret_cast<const std::byte*>(view.data()), view.size()};
}

using MaybeArray = std::optional<py::array>;

std::unique_ptr<AttentionBatch> make_batch(const TensorView& positions, const TensorView& sequence_index,
                                           const TensorView& page_tables, const TensorView& cos,
                                           const TensorView& sin, const MaybeArray& records) {
  if (!records) return std::make_unique<AttentionBatch>(positions, sequence_index, page_tables, cos, sin);
  const TensorView numbers = view_of(*records);
  return std::make_unique<AttentionBatch>(positions, sequence_index, page_tables, cos, sin, &numbers);
}

// Picks the tokens' rotations out of the tables: in Python it costs a decode step as much as the rest of a
// batch's construction.
std::unique_ptr<AttentionBatch> batch_of_table(const py::array& positions, const py::array& sequence_index,
                                               const py::array& page_tables, const py::array& cos_table,
                                               const py::array& sin_table, const MaybeArray& records) {
  const TensorView tokens = view_of(positions), cosines = view_of(cos_table), sines = view_of(sin_table);
  const int32_t* position = expect_i32(tokens, "AttentionBatch: positions", {kAny});
  const float* cosine = expect_f32(cosines, "AttentionBatch: cos_table", {kAny, kAny});
  const int64_t T = tokens.shape[0], longest = cosines.shape[0], pairs = cosines.shape[1];
  const float* sine = expect_f32(sines, "AttentionBatch: sin_table", {longest, pairs});
  std::vector<float> rows(static_cast<size_t>(2 * T * pairs));
  float* to = rows.data();
  for (int64_t t = 0; t < T; ++t, to += pairs) {
    if (position[t] < 0 || position[t] >= longest) {
      throw KernelFailure("AttentionBatch: position " + std::to_string(position[t]) + " of token " +
                          std::to_string(t) + " is outside the tables of " + std::to_string(longest));
    }
    std::copy_n(cosine + position[t] * pairs, pairs, to);
    std::copy_n(sine + position[t] * pairs, pairs, to + T * pairs);
  }
  TensorView cos{
      .data = rows.data(), .type = cosines.type, .num_dims = 2, .shape = {T, pairs}, .contiguous = true};
  TensorView sin = cos;
  sin.data = rows.data() + T * pairs;
  return make_batch(tokens, view_of(sequence_index), view_of(page_tables), cos, sin, records);
}

}  // namespace

const kernels::KernelTable& chosen_table() {
  try {
    return kernels::kernel_table();
  } catch (const std::invalid_argument& wrong) {
    throw ConfigFailure(wrong.what());
  }
}

std::vector<std::string> levels_where(bool (*chosen)(const char* level)) {
  std::vector<std::string> levels;
  for (const char* const* name = kernels::level_names(); *name != nullptr; ++name) {
    if (chosen(*name)) levels.emplace_back(*name);
  }
  return levels;
}

std::vector<std::string> runnable_levels() {
  return levels_where([](const char* level) { return kernels::table_for_level(level) != nullptr; });
}

const kernels::KernelTable& PoolView::kernels() const { return table_ != nullptr ? *table_ : chosen_table(); }

PoolView PoolView::at_level(const std::string& level) const {
  // The process's own table is the fastest by measurement; its bits are the level's.
  if (const kernels::KernelTable& own = chosen_table(); level == own.name) return PoolView(threads_, &own);
  if (const kernels::KernelTable* table = kernels::table_for_level(level.c_str()))
    return PoolView(threads_, table);
  std::string known;
  for (const std::string& name : runnable_levels()) known += (known.empty() ? "" : ", ") + name;
  throw ConfigFailure("level " + level + " is not what this CPU and this build can run: " + known);
}

void bind_ops(py::module_& m) {
  register_failures();
  m.def("cpu_features", features, "What the CPU has and the operating system enables.");
  m.def("runnable_levels", &runnable_levels, "Of kernels, by name, best last.");
  m.def(
      "left_out_levels", [] { return levels_where(kernels::level_left_out); },
      "Levels that this CPU can run and this build leaves out.");
  m.def(
      "isa_choice",
      [] {
        const std::string name = chosen_table().name;  // first: it is what reports a wrong TWOFOLD_ISA
        return std::make_pair(name, std::string(kernels::kernel_table_reason()));
      },
      "The level of the CPU kernels and why it was chosen. ConfigError when TWOFOLD_ISA cannot be met.");

  m.def(
      "work_times",
      [] {
        std::map<std::string, double> seconds;
        for (int work = 0; work < kNumWorks; ++work)
          seconds[kWorkNames[work]] =
              1e-9 * static_cast<double>(work_ns[work].load(std::memory_order_relaxed));
        return seconds;
      },
      "Seconds that each kind of native work has taken since the process began.");
  // For every step: the dictionary of work_times takes 3.2 us to make and 20 to subtract.
  m.def(
      "work_of_parts",
      [] {
        const auto us = [](auto... works) {
          return 1e-3 * static_cast<double>(
                            (work_ns[static_cast<int>(works)].load(std::memory_order_relaxed) + ...));
        };
        return py::make_tuple(us(Work::kEmbedding),
                              us(Work::kQkv, Work::kKeysValues, Work::kAttention, Work::kOutput),
                              us(Work::kRouter), us(Work::kDenseFfn), us(Work::kExperts), us(Work::kHead));
      },
      "Microseconds of (embedding, attention, routers, dense feed-forward, experts, head) since the process "
      "began.");

  m.def("cgroup_folders", &cgroup_folders, py::arg("controller"), py::arg("root") = "",
        "Folders of this process's cgroup and of those above it, in both versions of cgroups.");

  py::class_<PoolView>(m, "ThreadPool",
                       "Threads that share the work of one operation at a time, and kernels.")
      .def(py::init(&make_pool), py::arg("num_threads") = 0, py::arg("numa") = "off", py::arg("root") = "")
      .def_property_readonly("num_threads", [](const PoolView& pool) { return pool.threads().num_threads(); })
      .def_property_readonly("num_nodes", [](const PoolView& pool) { return pool.threads().num_nodes(); })
      .def_property_readonly("reason", [](const PoolView& pool) { return pool.threads().plan().reason; })
      .def_property_readonly("placement",
                             [](const PoolView& pool) {
                               py::list threads;
                               for (const PoolThread& thread : pool.threads().plan().threads)
                                 threads.append(py::make_tuple(thread.node, thread.bound));
                               return threads;
                             })
      .def("bind_caller", [](const PoolView& pool) { pool.threads().bind_caller(); })
      .def(
          "limit",
          [](const PoolView& pool, int count) {
            try {
              pool.threads().limit(count);
            } catch (const std::invalid_argument& wrong) {
              throw ConfigFailure(wrong.what());
            }
          },
          py::arg("count"), "Operations run on so many threads from now on; 0: on all.")
      .def("at_level", &PoolView::at_level, py::arg("level"),
           "The same threads, for operators with the kernels of one level.")
      .def_property_readonly("level", [](const PoolView& pool) { return pool.kernels().name; });

  py::class_<StateCache>(m, "StateCache", "Native memory of what sequences keep, in pages.")
      .def(py::init(&make_cache), py::arg("layers"), py::arg("num_pages"), py::arg("page_size"),
           py::arg("record_bytes") = std::vector<int64_t>(), py::arg("num_records") = 0)
      .def_property_readonly("num_layers", &StateCache::num_layers)
      .def_property_readonly("num_pages", &StateCache::num_pages)
      .def_property_readonly("page_size", &StateCache::page_size)
      .def_property_readonly("num_records", &StateCache::num_records)
      .def_property_readonly("bytes", &StateCache::bytes)
      .def("fork_page", &StateCache::fork_page, py::arg("from_page"), py::arg("to_page"))
      .def("fork_record", &StateCache::fork_record, py::arg("from_record"), py::arg("to_record"))
      .def(
          "read_page", [](const StateCache& cache, int page) { return bytes_of(cache.page_snapshot(page)); },
          py::arg("page"))
      .def(
          "write_page",
          [](StateCache& cache, int page, const py::bytes& data) { cache.restore_page(page, span_of(data)); },
          py::arg("page"), py::arg("data"))
      .def(
          "read_record", [](const StateCache& cache, int record) { return bytes_of(cache.snapshot(record)); },
          py::arg("record"))
      .def(
          "write_record",
          [](StateCache& cache, int record, const py::bytes& data) { cache.restore(record, span_of(data)); },
          py::arg("record"), py::arg("data"))
      .def("resize", &resize_cache, py::arg("num_pages"), py::arg("kept"), py::arg("keep_records") = true);

  py::class_<AttentionBatch>(m, "AttentionBatch", "One flattened batch of tokens as attention sees it.")
      .def(py::init([](const py::array& positions, const py::array& sequence_index,
                       const py::array& page_tables, const py::array& rope_cos, const py::array& rope_sin,
                       const MaybeArray& records) {
             return make_batch(view_of(positions), view_of(sequence_index), view_of(page_tables),
                               view_of(rope_cos), view_of(rope_sin), records);
           }),
           py::arg("positions"), py::arg("sequence_index"), py::arg("page_tables"), py::arg("rope_cos"),
           py::arg("rope_sin"), py::arg("records") = py::none())
      .def_static("of_table", &batch_of_table, py::arg("positions"), py::arg("sequence_index"),
                  py::arg("page_tables"), py::arg("cos_table"), py::arg("sin_table"),
                  py::arg("records") = py::none(), "The same, of rotations by position [longest, pairs].")
      .def(
          "add_rotation",
          [](AttentionBatch& batch, const py::array& rope_cos, const py::array& rope_sin) {
            batch.add_rotation(view_of(rope_cos), view_of(rope_sin));
          },
          py::arg("rope_cos"), py::arg("rope_sin"))
      .def(
          "keep_records",
          [](AttentionBatch& batch, const py::array& numbers) { batch.keep_records(view_of(numbers)); },
          py::arg("numbers"), "Records that receive the layers' state after each token, [T] i32; -1: none.")
      .def(
          "see_until", [](AttentionBatch& batch, const py::array& ends) { batch.see_until(view_of(ends)); },
          py::arg("ends"),
          "Position after the last one that each token attends to in bidirectional layers, [T] i32.")
      .def_property_readonly("num_tokens", &AttentionBatch::num_tokens);

  bind_panels(m);
  bind_ranks(m);
  bind_dense_ops(m);
  bind_row_table(m);
  bind_blocks(m);
  bind_ceilings(m);
  bind_format_rows(m);
  bind_sampling(m);
}

}  // namespace twofold::bindings
