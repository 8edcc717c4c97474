// Which of several kernels that give the same bits is the fastest on this CPU: only a measurement knows.
#pragma once
#include <string>
#include <vector>

#include "twofold/kernels.h"

namespace twofold::kernels {

// Replaces in `table`, the last of `levels`, each packed product by the fastest that a level has for the same
// activations, if it is clearly faster; products that round their activations stay. A few milliseconds in
// all. Returns what was chosen: "avx512 for f32, f16; avx512_vnni for q8_0", empty if there was nothing to
// choose.
std::string choose_by_measurement(const std::vector<const KernelTable*>& levels, KernelTable& table);

}  // namespace twofold::kernels
