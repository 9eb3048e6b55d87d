// C interface of the kernels: raw pointers, strides in elements, sizes. No torch types, no exceptions, no iostream, so
// that the library needs nothing newer than GLIBC 2.28 and GLIBCXX 3.4.24.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Element types of the data pointers.
enum MoembDtype {
  MOEMB_FP32 = 0,
  MOEMB_BF16 = 1,
  MOEMB_FP16 = 2,
  MOEMB_INT32 = 3,
  MOEMB_INT64 = 4,
  MOEMB_OTHER = 255,
};

// Return values of the kernels; the binding turns anything but MOEMB_OK into a RuntimeError.
enum MoembStatus {
  MOEMB_OK = 0,
  MOEMB_NO_MEMORY = 1,       // a workspace could not be allocated
  MOEMB_UNSUPPORTED = 2,     // this CPU, dtype or size; Python asks `supports` first
  MOEMB_BAD_ARGUMENT = 3,    // sizes that contradict each other
};

enum MoembIsa {
  MOEMB_ISA_NONE = 0,
  MOEMB_ISA_AVX512 = 1,  // F, BW, VL, DQ and FMA
  MOEMB_ISA_AMX = 2,     // and AVX512-BF16, AMX-TILE, AMX-BF16 with the kernel's permission
};

// ---- cpu.cpp ------------------------------------------------------------------------------------------------------

// Best instruction set that this CPU and the limit allow. The first call reads the CPU, asks the kernel for the AMX
// state and reads MOEMB_CPU_ISA (`amx`, `avx512` or `none`); later calls cost one load.
int moemb_cpu_isa(void);

// Lower (never raise) what moemb_cpu_isa returns; MOEMB_ISA_AMX lifts the limit again. For tests.
void moemb_cpu_limit_isa(int limit);

// ---- gemm_*.cpp, experts_*.cpp -------------------------------------------------------------------------------------

// ---- gated_delta_*.cpp, causal_conv.cpp ----------------------------------------------------------------------------

// ---- norms.cpp, rows.cpp, router.cpp, attention_*.cpp --------------------------------------------------------------

#ifdef __cplusplus
}
#endif
