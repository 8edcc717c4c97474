// Peak rates of this machine: the ceilings beside every measurement.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>

#include "host/ceilings.h"
#include "module.h"
#include "ops/bind_ops.h"
#include "pool_view.h"
#include "tensor_arguments.h"

namespace py = pybind11;

namespace twofold::bindings {
namespace {

std::map<std::string, double> measure(const PoolView& pool, const std::optional<std::string>& level,
                                      int64_t read_bytes, double round_s) {
  const std::string name = level.value_or(chosen_table().name);
  if (kernels::table_for_level(name.c_str()) == nullptr) {
    throw ConfigFailure("measure_ceilings: level is \"" + name +
                        "\", which this CPU cannot run or which is none");
  }
  if (read_bytes < 1 || read_bytes > int64_t{1} << 40 || !(round_s > 0 && round_s <= 10)) {
    throw ConfigFailure(
        "measure_ceilings: read_bytes must be from 1 to 2^40, round_s above 0 and at most 10");
  }
  const py::gil_scoped_release release;
  std::map<std::string, double> found{
      {"read_gb_per_s", 1e-9 * read_bytes_per_s(pool, name, read_bytes)},
      {"fork_join_us", 1e6 * fork_join_s(pool)},
  };
  for (const ProductRate& rate : products_per_s(pool, name, round_s)) {
    found[std::string(rate.kind) + "_gop_per_s"] = 1e-9 * rate.per_second;
  }
  return found;
}

// The kind of product in which this process multiplies a format, once there are enough tokens.
std::string products_of(const std::string& format) {
  const kernels::FormatKernels& kernel = chosen_table().of(format_named(format));
  const bool tiles = kernel.level != nullptr && std::string(kernel.level) == "amx";
  switch (kernel.activation) {
    case kernels::ActivationKind::kF32:
      return "f32";
    case kernels::ActivationKind::kBF16:
      return tiles ? "bf16_tiles" : "bf16";
    default:
      return tiles ? "int8_tiles" : "int8";
  }
}

}  // namespace

void bind_ceilings(py::module_& m) {
  m.def("measure_ceilings", &measure, py::arg("pool"), py::kw_only(), py::arg("level") = py::none(),
        py::arg("read_bytes") = int64_t{1} << 29, py::arg("round_s") = 0.01,
        "What the pool's threads can do at most at a level (default: this process's), the fastest of several "
        "turns: "
        "read_gb_per_s, fork_join_us, and f32_gop_per_s, bf16_..., int8_..., bf16_tiles_..., int8_tiles_... "
        "as far "
        "as the level has them (a multiplication and an addition are two operations).");
  m.def("products_of", &products_of, py::arg("format"),
        "The kind of product that weights of a format are multiplied in: f32, bf16, int8, bf16_tiles, "
        "int8_tiles.");
}

}  // namespace twofold::bindings
