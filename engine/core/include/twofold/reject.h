// The error for a value out of range: what was given, and what is expected.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace twofold {

template <typename Value>
[[noreturn]] void reject(const std::string& what, const Value& value, const std::string& expected) {
  std::string given;
  if constexpr (std::is_arithmetic_v<Value>) {
    given = std::to_string(value);
  } else {
    given = value;
  }
  throw std::invalid_argument(what + " = " + given + " given, " + expected + " expected");
}

}  // namespace twofold
