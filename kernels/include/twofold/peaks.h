// How many products a core can do at most: loops that stay in registers. For the ceilings beside every
// measurement.
#pragma once
#include <cstdint>

namespace twofold::kernels {

// Kinds of product: "f32" at every level, "bf16" and "int8" with instructions that multiply and add them in
// pairs or fours, "bf16_tiles" and "int8_tiles" with AMX.
inline constexpr const char* kProductKinds[] = {"f32", "bf16", "int8", "bf16_tiles", "int8_tiles"};

// Runs `rounds` rounds of independent products of `kind` with the best instructions that a level may use and
// this CPU has, and returns the operations done (a multiplication and an addition are two); 0 where the level
// has no such products.
int64_t peak_operations(const char* level, const char* kind, int64_t rounds);

}  // namespace twofold::kernels
