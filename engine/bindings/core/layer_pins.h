// Python names of layer pins.
#pragma once
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "twofold/expert_cache.h"

namespace twofold::bindings {

// Converts auto, cpu, gpu. Throws ValueError for another name.
inline std::vector<LayerPin> pins_of(const std::vector<std::string>& names) {
  std::vector<LayerPin> pins;
  for (const std::string& name : names) {
    if (name != "auto" && name != "cpu" && name != "gpu") {
      throw pybind11::value_error("a layer's pin is " + name + "; expected auto, cpu or gpu");
    }
    pins.push_back(name == "auto" ? LayerPin::kFree : name == "cpu" ? LayerPin::kNever : LayerPin::kResident);
  }
  return pins;
}

}  // namespace twofold::bindings
