// Which instructions may be used: the CPU has them, the operating system saves their registers, the kernel granted AMX.
#include <cpuid.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "moemb_cpu.h"

namespace {

constexpr int kArchRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM of arch_prctl, Linux 5.16
constexpr int kTileData = 18;                   // the XSAVE component of the AMX tiles

constexpr bool bit(unsigned word, int index) { return (word >> index) & 1u; }

unsigned long long enabled_state() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}

int detect() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return MOEMB_ISA_NONE;
  const bool fma = bit(ecx, 12), saves_state = bit(ecx, 27);
  if (!fma || !saves_state) return MOEMB_ISA_NONE;
  const unsigned long long state = enabled_state();
  constexpr unsigned long long vectors = 0xE6;  // SSE, AVX, opmask, upper halves of ZMM 0-15, ZMM 16-31
  if ((state & vectors) != vectors) return MOEMB_ISA_NONE;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return MOEMB_ISA_NONE;
  const unsigned subleaves = eax;
  const bool avx512 = bit(ebx, 16) && bit(ebx, 17) && bit(ebx, 30) && bit(ebx, 31);  // F, DQ, BW, VL
  if (!avx512) return MOEMB_ISA_NONE;
  const bool tiles = bit(edx, 24) && bit(edx, 22);  // AMX-TILE, AMX-BF16
  if (!tiles || subleaves < 1) return MOEMB_ISA_AVX512;
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !bit(eax, 5)) return MOEMB_ISA_AVX512;  // AVX512-BF16
  constexpr unsigned long long tile_state = 3ull << 17;
  if ((state & tile_state) != tile_state) return MOEMB_ISA_AVX512;
  // Granted to the whole process, threads of other runtimes included.
  if (syscall(SYS_arch_prctl, kArchRequestPermission, kTileData) != 0) return MOEMB_ISA_AVX512;
  return MOEMB_ISA_AMX;
}

int from_environment() {
  const char* name = getenv("MOEMB_CPU_ISA");
  if (name == nullptr) return MOEMB_ISA_AMX;
  if (strcmp(name, "none") == 0) return MOEMB_ISA_NONE;
  if (strcmp(name, "avx512") == 0) return MOEMB_ISA_AVX512;
  return MOEMB_ISA_AMX;
}

int detected() {
  static const int isa = detect();
  return isa;
}

std::atomic<int>& limit() {
  static std::atomic<int> value{from_environment()};
  return value;
}

}  // namespace

extern "C" int moemb_cpu_isa(void) {
  const int allowed = limit().load(std::memory_order_relaxed);
  const int present = detected();
  return present < allowed ? present : allowed;
}

extern "C" void moemb_cpu_limit_isa(int value) { limit().store(value, std::memory_order_relaxed); }
