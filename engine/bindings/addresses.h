// Addresses and streams of devices as arguments: integers, objects with data_ptr() (torch's tensors), or None for null.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace twofold::bindings {

struct Address {
  uint64_t value = 0;

  template <typename T>
  operator T*() const {
    return reinterpret_cast<T*>(value);
  }
};

}  // namespace twofold::bindings

template <>
struct pybind11::detail::type_caster<twofold::bindings::Address> {
  PYBIND11_TYPE_CASTER(twofold::bindings::Address, const_name("int | Tensor | None"));

  bool load(handle given, bool) {
    if (given.is_none()) return true;
    object number = reinterpret_borrow<object>(given);
    if (!PyLong_Check(given.ptr())) {
      if (!hasattr(given, "data_ptr")) return false;
      number = given.attr("data_ptr")();
    }
    value.value = PyLong_AsUnsignedLongLong(number.ptr());
    if (PyErr_Occurred() == nullptr) return true;
    PyErr_Clear();
    return false;
  }
  static handle cast(twofold::bindings::Address address, return_value_policy, handle) {
    return PyLong_FromUnsignedLongLong(address.value);
  }
};
