// What the AMX level supplies, written over T (amx_tiles.h).
#pragma once
#include "amx_attention.h"
#include "amx_bf16.h"
#include "amx_channel.h"
#include "amx_integer.h"

namespace twofold::kernels {
namespace {

template <class T>
constexpr KernelTable amx_part() {
  KernelTable part;
  add_amx_bf16<T>(part);
  add_amx_integer<T>(part);
  add_amx_channel<T>(part);
  part.tile_attention = &AmxAttention<T>::kKernels;
  return part;
}

}  // namespace
}  // namespace twofold::kernels
