#include "module.h"

#include "launches/bind_launches.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "Twofold's native code: decisions, CPU operations and the MoE executor.";
  twofold::bindings::bind_core(m);
  twofold::bindings::bind_ops(m);
  twofold::bindings::bind_runtime(m);
  twofold::bindings::bind_device_launches(m);
}
