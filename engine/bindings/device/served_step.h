// Results of serving a decode step, as Python receives them.
#pragma once
#include <pybind11/pybind11.h>

#include <chrono>

#include "device/mailbox.h"

namespace twofold::bindings {

inline std::chrono::nanoseconds nanoseconds_of(double seconds) {
  return std::chrono::nanoseconds(int64_t(seconds * 1e9));
}

// {done, layer, text} of serve(), which runs without the GIL.
template <typename Serve>
pybind11::dict served_dict(Serve serve) {
  ServedStep served;
  {
    const pybind11::gil_scoped_release release;
    served = serve();
  }
  return pybind11::dict(pybind11::arg("done") = served.state == PostState::kPosted,
                        pybind11::arg("layer") = served.layer, pybind11::arg("text") = served.text());
}

}  // namespace twofold::bindings
