// Going on with another stack.
#pragma once
#include <cstddef>
#include <cstdint>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace simt {

// Where something that does not run goes on.
struct Context {
#ifdef __x86_64__
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

// Leaves `to` at the beginning of `entry`, which never returns.
void begin_on(uint8_t* stack, size_t bytes, void (*entry)(), Context& to);
void change(Context& from, Context& to);

}  // namespace simt
