// One function per subject; each lives in a bind_*.cpp of its own.
#pragma once
#include <pybind11/pybind11.h>

namespace twofold::bindings {
void bind_core(pybind11::module_& m);            // cost model, cache policies, and the next two
void bind_core_lab(pybind11::module_& m);        // called by bind_core
void bind_core_scheduler(pybind11::module_& m);  // called by bind_core
void bind_ops(pybind11::module_& m);             // thread pool, dense CPU operations, CPU features
void bind_routing_counts(pybind11::module_& m);  // called by bind_runtime
void bind_store(pybind11::module_& m);           // called by bind_runtime
void bind_rank_worker(pybind11::module_& m);     // called by bind_runtime
void bind_training(pybind11::module_& m);        // called by bind_runtime
void bind_runtime(pybind11::module_& m);         // expert store, accelerators, MoE executor, events
}  // namespace twofold::bindings
