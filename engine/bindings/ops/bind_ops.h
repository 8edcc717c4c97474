// What bind_ops.cpp shares with the files it calls.
#pragma once
#include <pybind11/pybind11.h>

#include "twofold/kernels.h"

namespace twofold::bindings {
// The process's kernels; ConfigError when TWOFOLD_ISA cannot be met.
const kernels::KernelTable& chosen_table();

void bind_dense_ops(pybind11::module_& m);    // packed matrices, embedding, LM head
void bind_row_table(pybind11::module_& m);    // tables that stay in files
void bind_blocks(pybind11::module_& m);       // blocks, decoder
void bind_ceilings(pybind11::module_& m);     // what the machine can do at most
void bind_format_rows(pybind11::module_& m);  // quantising
void bind_sampling(pybind11::module_& m);
void bind_ranks(pybind11::module_& m);   // other processes with shares of the weights
void bind_panels(pybind11::module_& m);  // panels in files
}  // namespace twofold::bindings
