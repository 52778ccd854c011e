// A fibre's saved registers, on a stack of its own: by hand on x86-64, elsewhere by the C library (which also saves the
// signal mask, two system calls a switch).
#pragma once
#include <stddef.h>
#include <ucontext.h>

namespace {

#if defined(__x86_64__) && !defined(ONNXFUSE_UCONTEXT)
struct Context {
  void* stack_pointer;
};
extern "C" void onnxfuse_emulator_switch(void** save, void* load);
asm(R"(
.text
.type onnxfuse_emulator_switch, @function
.hidden onnxfuse_emulator_switch
onnxfuse_emulator_switch:
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
.size onnxfuse_emulator_switch, .-onnxfuse_emulator_switch
)");
void start(Context& context, char* stack, size_t size, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + size);
  *--top = nullptr;  // the entry's return address: it never returns
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}
void change(Context& from, Context& to) { onnxfuse_emulator_switch(&from.stack_pointer, to.stack_pointer); }
#else
struct Context {
  ucontext_t context;
};
void start(Context& context, char* stack, size_t size, void (*entry)()) {
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = size;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
}
void change(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
#endif

}  // namespace
