// Launchers as methods of a device.
#pragma once
#include "bind_device.h"
#include "cuda_error.h"
#include "fields.h"

namespace twofold::bindings {

// The launcher's own arguments, with addresses and the stream as `Address`. KernelError if the device refuses it.
template <typename... Arguments, typename... Extra>
void def_launch(DeviceClass& device, const char* name, int (*launch)(Arguments...), const Extra&... extra) {
  device.def(
      name,
      [=](DeviceApi&, Crossing<Arguments>... given) {
        check_cuda(launch(static_cast<Arguments>(given)...), name);
      },
      extra...);
}

}  // namespace twofold::bindings
