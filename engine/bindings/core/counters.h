// The core's counters as dictionaries, name by name as they are declared.
#pragma once
#include <pybind11/pybind11.h>

#include "twofold/counters.h"

namespace twofold::bindings {

#define TWOFOLD_COUNT_ITEM(name, meaning) given[#name] = counts.name;
#define TWOFOLD_COUNTS_OF(Struct, COUNTS)                 \
  inline pybind11::dict counts_of(const Struct& counts) { \
    pybind11::dict given;                                 \
    COUNTS(TWOFOLD_COUNT_ITEM)                            \
    return given;                                         \
  }
TWOFOLD_COUNTS_OF(PlacementCounts, TWOFOLD_PLACEMENT_COUNTS)
TWOFOLD_COUNTS_OF(PrefetchCounts, TWOFOLD_PREFETCH_COUNTS)
TWOFOLD_COUNTS_OF(DynamicUpdateCounts, TWOFOLD_DYNAMIC_UPDATE_COUNTS)
#undef TWOFOLD_COUNTS_OF
#undef TWOFOLD_COUNT_ITEM

// By group.
inline pybind11::dict counts_of(const SchedulerCounts& counts) {
  pybind11::dict groups;
#define TWOFOLD_COUNT_GROUP(group, COUNTS, what) groups[#group] = counts_of(counts.group);
  TWOFOLD_SCHEDULER_GROUPS(TWOFOLD_COUNT_GROUP)
#undef TWOFOLD_COUNT_GROUP
  return groups;
}

// By group, what is counted and the meaning of each counter.
inline pybind11::dict count_meanings() {
  pybind11::dict groups;
#define TWOFOLD_COUNT_MEANING(name, meaning) given[#name] = meaning;
#define TWOFOLD_COUNT_GROUP(group, COUNTS, what)        \
  {                                                     \
    pybind11::dict given;                               \
    COUNTS(TWOFOLD_COUNT_MEANING)                       \
    groups[#group] = pybind11::make_tuple(what, given); \
  }
  TWOFOLD_EXECUTOR_GROUPS(TWOFOLD_COUNT_GROUP)
  TWOFOLD_SCHEDULER_GROUPS(TWOFOLD_COUNT_GROUP)
#undef TWOFOLD_COUNT_GROUP
#undef TWOFOLD_COUNT_MEANING
  return groups;
}

}  // namespace twofold::bindings
