// Blocks in Python: classes with the thread pool and keyword arguments, see _core/__init__.pyi.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>

#include "blocks/block_arguments.h"
#include "moe/block.h"

namespace twofold::bindings {

template <typename Kind>
auto bind_block(pybind11::module_& m, const char* name, const char* help,
                std::shared_ptr<Kind> (*make)(BlockArguments)) {
  pybind11::class_<Kind, Block, std::shared_ptr<Kind>> bound(m, name, help);
  bound.def(pybind11::init([=](const PoolView& pool, const pybind11::kwargs& given) {
              return make({name, pool, given});
            }),
            pybind11::arg("pool"));
  return bound;
}

void bind_attention(pybind11::module_& m);
void bind_residuals(pybind11::module_& m);

}  // namespace twofold::bindings
