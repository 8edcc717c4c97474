// What the AMX level supplies, written over T (amx/tiles.h).
#pragma once
#include "amx/attention.h"
#include "amx/bf16.h"
#include "amx/channel.h"
#include "amx/integer.h"

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
