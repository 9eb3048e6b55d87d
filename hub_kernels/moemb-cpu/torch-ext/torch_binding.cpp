// The module itself, and what is asked about the CPU. Each family of kernels has its own torch_binding_<family>.cpp.
#include "torch_binding.h"

#if __has_include("registration.h")
#include "registration.h"  // kernel-builder writes it: the PyInit function of the extension
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
#endif

#define MOEMB_TEXT_(name) #name
#define MOEMB_TEXT(name) MOEMB_TEXT_(name)

// a constant: it is there before the static objects of other files register their operators
const char* const moemb::operator_namespace = MOEMB_TEXT(TORCH_EXTENSION_NAME);

static int64_t isa() { return moemb_cpu_isa(); }

static void limit_isa(int64_t limit) { moemb_cpu_limit_isa(static_cast<int>(limit)); }

MOEMB_LIBRARY(cpu) {
  ops.def("isa() -> int");
  ops.any<isa>("isa");
  ops.def("limit_isa(int limit) -> ()");
  ops.any<limit_isa>("limit_isa");
}
