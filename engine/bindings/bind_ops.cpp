#include "module.h"

namespace twofold::bindings {
void bind_ops(pybind11::module_&) {}
}  // namespace twofold::bindings
