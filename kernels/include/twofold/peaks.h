// How many products a core can do at most: loops that stay in registers. For the ceilings beside every
// measurement.
#pragma once
#include <cstdint>

namespace twofold::kernels {

// The kinds this CPU can do, ended by nullptr: "f32" always, "bf16" and "int8" with instructions that
// multiply and add them in pairs or fours, "bf16_tiles" and "int8_tiles" with AMX.
const char* const* peak_kinds();

// Runs `rounds` rounds of independent products of `kind` and returns the operations done (a multiplication
// and an addition are two); 0 for a kind that peak_kinds does not name.
int64_t peak_operations(const char* kind, int64_t rounds);

}  // namespace twofold::kernels
