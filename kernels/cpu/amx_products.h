// What the AMX level supplies, written over T (amx_tiles.h).
#pragma once
#include "amx_bf16.h"
#include "amx_integer.h"

namespace twofold::kernels {
namespace {

template <class T>
constexpr KernelTable amx_part() {
  KernelTable part;
  add_amx_bf16<T>(part);
  add_amx_integer<T>(part);
  return part;
}

}  // namespace
}  // namespace twofold::kernels
