// twofold._testing: single decisions and single kernels, which only tests and kernels/bench call.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "twofold/kernels.h"
#include "twofold/weight_format.h"

namespace twofold::bindings {
void bind_tested_costs(pybind11::module_& m);      // cost model, planners
void bind_tested_cache(pybind11::module_& m);      // expert cache, virtual clock, event ring
void bind_tested_scheduler(pybind11::module_& m);  // layer scheduler, decisions of a replay
void bind_tested_runtime(pybind11::module_& m);    // online correction
void bind_tested_blocks(pybind11::module_& m);     // a router, shared experts
void bind_kernels(pybind11::module_& m);           // single kernels by level
void bind_packed_kernels(pybind11::module_& m);
void bind_delta_kernels(pybind11::module_& m);

// One level by name; ConfigError when there is none or this CPU cannot run it.
const kernels::KernelTable& level_named(const std::string& level);
}  // namespace twofold::bindings
