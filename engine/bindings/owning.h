// Native objects that read memory of other objects, and hold on to these for as long as they live.
#pragma once
#include <memory>
#include <tuple>
#include <utility>

namespace twofold::bindings {

// `made`, with its owners: they are freed after it.
template <typename Made, typename... Owners>
std::shared_ptr<Made> owning(std::unique_ptr<Made> made, Owners... owners) {
  using Held = std::pair<std::tuple<Owners...>, std::unique_ptr<Made>>;
  auto held = std::make_shared<Held>(std::tuple<Owners...>(std::move(owners)...), std::move(made));
  return {held, held->second.get()};
}

}  // namespace twofold::bindings
