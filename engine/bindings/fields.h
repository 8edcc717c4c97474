// Python classes of plain structs: one argument per field, named once, beside the field it sets.
#pragma once
#include <pybind11/pybind11.h>

#include <type_traits>
#include <utility>

#include "addresses.h"

namespace twofold::bindings {

// An argument of type Given and what it does to a struct: set(Struct&, Given&&).
template <typename Given, typename Set, typename Argument>
struct Field {
  Set set;
  Argument argument;
};

template <typename Given, typename Set, typename Argument>
Field<Given, Set, Argument> field_by(Argument argument, Set set) {
  return {std::move(set), std::move(argument)};
}

template <typename Value>
using Crossing = std::conditional_t<std::is_pointer_v<Value>, Address, Value>;

template <typename Struct, typename Value, typename Argument>
auto field_of(Value Struct::* member, Argument argument) {
  return field_by<Crossing<Value>>(std::move(argument), [member](Struct& made, Crossing<Value>&& given) {
    made.*member = std::move(given);
  });
}

template <typename Struct, typename Value>
auto field(const char* name, Value Struct::* member) {
  return field_of(member, pybind11::arg(name));
}

// A field whose argument has a default.
template <typename Struct, typename Value>
auto field(const char* name, Value Struct::* member, const Crossing<Value>& otherwise) {
  return field_of(member, pybind11::arg(name) = otherwise);
}

// __init__ with an argument per field, in this order; by name only unless kByPosition.
template <bool kByPosition = false, typename Type, typename... Given, typename... Set, typename... Argument>
Type def_fields(Type type, Field<Given, Set, Argument>... fields) {
  using Struct = typename Type::type;
  auto made = pybind11::init([... set = std::move(fields.set)](Given... given) {
    Struct filled{};
    (set(filled, std::move(given)), ...);
    return filled;
  });
  if constexpr (kByPosition) {
    type.def(std::move(made), std::move(fields.argument)...);
  } else {
    type.def(std::move(made), pybind11::kw_only(), std::move(fields.argument)...);
  }
  return type;
}

}  // namespace twofold::bindings
