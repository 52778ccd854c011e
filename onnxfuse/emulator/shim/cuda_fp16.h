// Part of emulator.h, which every kernel's text is compiled after.
#ifndef ONNXFUSE_EMULATOR
#error "compile kernel text through tests.emulator"
#endif
