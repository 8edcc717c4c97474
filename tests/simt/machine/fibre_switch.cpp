#include "machine/fibre_switch.h"

#ifdef __x86_64__

// What a call preserves lies on the stack that is left. glibc's setjmp and longjmp take three times as long.
extern "C" void simt_change(void** from, void* to);
asm(R"(
  .text
  .globl simt_change
  .hidden simt_change
  .type simt_change, @function
simt_change:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size simt_change, .-simt_change
)");

namespace simt {

void begin_on(uint8_t* stack, size_t bytes, void (*entry)(), Context& to) {
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) / 16 * 16);
  *--top = nullptr;  // where a caller would be
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  to.stack_pointer = top;
}

void change(Context& from, Context& to) { simt_change(&from.stack_pointer, to.stack_pointer); }

}  // namespace simt

#else

namespace simt {

void begin_on(uint8_t* stack, size_t bytes, void (*entry)(), Context& to) {
  getcontext(&to.context);
  to.context.uc_stack.ss_sp = stack;
  to.context.uc_stack.ss_size = bytes;
  to.context.uc_link = nullptr;
  makecontext(&to.context, entry, 0);
}

void change(Context& from, Context& to) { swapcontext(&from.context, &to.context); }

}  // namespace simt

#endif
