#include "module.h"

namespace twofold::bindings {
void bind_core(pybind11::module_&) {}
}  // namespace twofold::bindings
