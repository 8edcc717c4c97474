// What bind_ops.cpp shares with the files it calls.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "twofold/kernels.h"
#include "twofold/weight_format.h"

namespace twofold::bindings {
// The process's kernels; ConfigError when TWOFOLD_ISA cannot be met.
const kernels::KernelTable& chosen_table();

void bind_dense_ops(pybind11::module_& m);  // packed matrices, embedding, LM head
void bind_blocks(pybind11::module_& m);     // blocks, decoder
void bind_kernels(pybind11::module_& m);    // single kernels by level
void bind_peaks(pybind11::module_& m);      // what a core can do at most
void bind_packed_kernels(pybind11::module_& m);
void bind_format_rows(pybind11::module_& m);  // quantising
void bind_sampling(pybind11::module_& m);

// One level by name; ConfigError when there is none or this CPU cannot run it.
const kernels::KernelTable& level_named(const std::string& level);
}  // namespace twofold::bindings
