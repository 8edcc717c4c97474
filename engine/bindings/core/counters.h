// The core's counters as dictionaries, name by name as they are declared.
#pragma once
#include <pybind11/pybind11.h>

#include "twofold/counters.h"

namespace twofold::bindings {

#define TWOFOLD_COUNT_ITEM(name, meaning) given[#name] = counts.name;

inline pybind11::dict counts_of(const PrefetchCounts& counts) {
  pybind11::dict given;
  TWOFOLD_PREFETCH_COUNTS(TWOFOLD_COUNT_ITEM)
  return given;
}

inline pybind11::dict counts_of(const DynamicUpdateCounts& counts) {
  pybind11::dict given;
  TWOFOLD_DYNAMIC_UPDATE_COUNTS(TWOFOLD_COUNT_ITEM)
  return given;
}

}  // namespace twofold::bindings
