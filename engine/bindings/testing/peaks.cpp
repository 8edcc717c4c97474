// What a core can do at most, for the ceilings beside every measurement.
#include "twofold/peaks.h"

#include <pybind11/pybind11.h>

#include <string>

#include "testing/testing.h"

namespace py = pybind11;

namespace twofold::bindings {

void bind_peaks(py::module_& m) {
  m.def(
      "peak_kinds",
      [] {
        py::list kinds;
        for (const char* const* kind = kernels::peak_kinds(); *kind != nullptr; ++kind) kinds.append(*kind);
        return kinds;
      },
      "The kinds of product this CPU has: f32, bf16, int8.");
  m.def(
      "peak_operations",
      [](const std::string& kind, int64_t rounds) {
        int64_t done = 0;
        {
          const py::gil_scoped_release release;
          done = kernels::peak_operations(kind.c_str(), rounds);
        }
        if (done == 0 && rounds > 0) throw py::value_error("no such kind on this CPU: " + kind);
        return done;
      },
      py::arg("kind"), py::arg("rounds"), "Runs products in registers; returns the operations done.");
}

}  // namespace twofold::bindings
