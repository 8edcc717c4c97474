// Picking tokens and log probabilities from rows of logits.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "array_view.h"
#include "ops/bind_ops.h"
#include "ops/sampling/sampling.h"
#include "pool_view.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

constexpr int64_t kDrawFields = sizeof(Draw) / sizeof(double);

void expect_entries(const char* what, int64_t given, int64_t expected) {
  if (given != expected) {
    throw KernelFailure(std::string(what) + " has " + std::to_string(given) + " entries; expected " +
                        std::to_string(expected) + ", one for each row");
  }
}

py::array_t<int32_t> pick(const PoolView& pool, const py::array& logits, const Array<double>& draws,
                          const std::vector<const TokenRules*>& rules) {
  const TensorView rows = view_of(logits);
  float* values = expect_writable_f32(rows, "pick_tokens: logits", {kAny, kAny});
  const int64_t num_rows = rows.shape[0], vocabulary = rows.shape[1];
  if (draws.ndim() != 2 || draws.shape(1) != kDrawFields)
    throw KernelFailure("pick_tokens: draws has another shape; expected float64 (rows, " +
                        std::to_string(kDrawFields) + ")");
  expect_entries("pick_tokens: draws", draws.shape(0), num_rows);
  expect_entries("pick_tokens: rules", static_cast<int64_t>(rules.size()), num_rows);
  if (vocabulary < 1) throw KernelFailure("pick_tokens: logits has no columns");
  std::vector<Draw> numbers(rules.size());
  for (size_t r = 0; r < numbers.size(); ++r) {
    const double* from = draws.data() + static_cast<int64_t>(r) * kDrawFields;
    numbers[r] = {from[0], from[1], from[2], from[3], from[4]};
    const Draw& draw = numbers[r];
    if (!(draw.temperature >= 0 && draw.top_p > 0 && draw.min_p >= 0 && draw.min_p <= 1 &&
          draw.uniform >= 0 && draw.uniform < 1)) {
      throw KernelFailure(
          "pick_tokens: row " + std::to_string(r) +
          " of draws is out of range; expected temperature >= 0, top_p > 0, min_p from 0 to 1 "
          "and a uniform number in [0, 1)");
    }
  }
  py::array_t<int32_t> tokens(num_rows);
  int32_t* out = tokens.mutable_data();
  const py::gil_scoped_release release;
  pick_tokens(pool.kernels(), pool, values, vocabulary, numbers, rules, out);
  return tokens;
}

void mask(const PoolView& pool, const py::array& logits, const std::vector<int64_t>& rows,
          const std::vector<Array<uint32_t>>& masks) {
  const TensorView view = view_of(logits);
  float* values = expect_writable_f32(view, "mask_logits: logits", {kAny, kAny});
  const int64_t num_words = (view.shape[1] + 31) / 32;
  expect_entries("mask_logits: masks", static_cast<int64_t>(masks.size()), static_cast<int64_t>(rows.size()));
  std::vector<MaskedRow> masked(rows.size());
  for (size_t i = 0; i < masked.size(); ++i) {
    masked[i] = {rows[i], masks[i].data()};
    if (rows[i] < 0 || rows[i] >= view.shape[0] || masks[i].ndim() != 1 || masks[i].shape(0) < num_words) {
      throw KernelFailure("mask_logits: row " + std::to_string(rows[i]) + " of logits (" +
                          std::to_string(view.shape[0]) + ", " + std::to_string(view.shape[1]) +
                          ") needs a mask of " + std::to_string(num_words) + " words of 32 bits; got " +
                          std::to_string(masks[i].size()));
    }
  }
  const py::gil_scoped_release release;
  mask_logits(pool, values, view.shape[1], masked);
}

using Answers = std::vector<std::vector<std::pair<int32_t, double>>>;

Answers log_softmax(const PoolView& pool, const py::array& logits, const std::vector<int64_t>& rows,
                    const std::vector<int32_t>& tokens, const std::vector<int32_t>& num_top) {
  const TensorView view = view_of(logits);
  const float* values = expect_f32(view, "log_probabilities: logits", {kAny, kAny});
  const auto count = static_cast<int64_t>(rows.size());
  expect_entries("log_probabilities: tokens", static_cast<int64_t>(tokens.size()), count);
  expect_entries("log_probabilities: num_top", static_cast<int64_t>(num_top.size()), count);
  std::vector<LogProbabilityQuery> queries(rows.size());
  for (size_t i = 0; i < queries.size(); ++i) {
    queries[i] = {rows[i], tokens[i], num_top[i]};
    if (rows[i] < 0 || rows[i] >= view.shape[0] || tokens[i] < 0 || tokens[i] >= view.shape[1] ||
        num_top[i] < 0) {
      throw KernelFailure("log_probabilities: row " + std::to_string(rows[i]) + ", token " +
                          std::to_string(tokens[i]) + " and " + std::to_string(num_top[i]) +
                          " likeliest were asked of logits (" + std::to_string(view.shape[0]) + ", " +
                          std::to_string(view.shape[1]) + ")");
    }
  }
  std::vector<std::vector<LogProbability>> found(queries.size());
  {
    const py::gil_scoped_release release;
    log_probabilities(pool.kernels(), pool, values, view.shape[1], queries, found);
  }
  Answers answers(found.size());
  for (size_t i = 0; i < found.size(); ++i) {
    for (const LogProbability& each : found[i]) answers[i].emplace_back(each.token, each.value);
  }
  return answers;
}

}  // namespace

void bind_sampling(py::module_& m) {
  py::class_<TokenRules>(m, "TokenRules", "What one request changes of its logits.")
      .def(py::init([](float presence, float frequency, float repetition,
                       std::vector<std::pair<int32_t, float>> bias,
                       std::vector<std::vector<int32_t>> bad_words, std::vector<int32_t> withheld,
                       int64_t min_tokens, const std::vector<int32_t>& prompt) {
             return TokenRules({presence, frequency, repetition, std::move(bias), std::move(bad_words),
                                std::move(withheld), min_tokens},
                               prompt);
           }),
           py::kw_only(), py::arg("presence_penalty") = 0.0f, py::arg("frequency_penalty") = 0.0f,
           py::arg("repetition_penalty") = 1.0f, py::arg("bias") = py::tuple(),
           py::arg("bad_words") = py::tuple(), py::arg("withheld") = py::tuple(), py::arg("min_tokens") = 0,
           py::arg("prompt") = py::tuple())
      .def("take", &TokenRules::take, py::arg("token"));
  m.def("pick_tokens", &pick, py::arg("pool"), py::arg("logits"), py::arg("draws"), py::arg("rules"));
  m.def("mask_logits", &mask, py::arg("pool"), py::arg("logits"), py::arg("rows"), py::arg("masks"));
  m.def("log_probabilities", &log_softmax, py::arg("pool"), py::arg("logits"), py::arg("rows"),
        py::arg("tokens"), py::arg("num_top"));
}

}  // namespace twofold::bindings
