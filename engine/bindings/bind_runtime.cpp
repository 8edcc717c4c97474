#include "module.h"

namespace twofold::bindings {
void bind_runtime(pybind11::module_&) {}
}  // namespace twofold::bindings
