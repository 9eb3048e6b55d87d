// Registers plain functions as torch operators through the C shim of the stable ABI alone. The C++ classes of the
// stable ABI would pull symbols newer than GLIBC 2.28 (shared_ptr, stringstream).
//
// A family's binding file holds functions over Tensor, std::optional<Tensor>, int64_t, double and bool that call the C
// kernels and end in `check(status, "op")`, and one block:
//
//   MOEMB_LIBRARY(norms) {
//     ops.def("rms_norm(Tensor states, Tensor weight, float eps, Tensor(a!) out) -> ()");
//     ops.cpu<rms_norm>("rms_norm");
//   }
//
// Functions return nothing, or one int64_t. Outputs are allocated by Python and passed as `Tensor(a!)`.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <torch/csrc/stable/c/shim.h>

#include <optional>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#include "moemb_cpu.h"

namespace moemb {

// Namespace of the operators; in one file (torch_binding.cpp), since it changes with every source of the build.
extern const char* const operator_namespace;

[[noreturn]] inline void fail(const char* where, const char* what) {
  char text[256];
  snprintf(text, sizeof(text), "moemb-cpu: %s: %s", where, what);
  throw std::runtime_error(text);
}

inline void shim(AOTITorchError status, const char* what) {
  if (status != 0) fail("torch", what);
}

// Raise the error that belongs to a kernel's return value.
inline void check(int status, const char* op) {
  switch (status) {
    case MOEMB_OK:
      return;
    case MOEMB_NO_MEMORY:
      fail(op, "out of memory for the workspace");
    case MOEMB_UNSUPPORTED:
      fail(op, "not supported on this CPU or for this dtype or size; ask supports() first");
    case MOEMB_BAD_ARGUMENT:
      fail(op, "sizes of the arguments contradict each other");
    default:
      fail(op, "unknown error");
  }
}

// A tensor argument; owns one reference, as the boxed calling convention demands.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {
    shim(aoti_torch_get_dim(handle_, &dim_), "get_dim");
    shim(aoti_torch_get_sizes(handle_, &sizes_), "get_sizes");
    shim(aoti_torch_get_strides(handle_, &strides_), "get_strides");
  }
  Tensor(Tensor&& other) noexcept
      : handle_(other.handle_), dim_(other.dim_), sizes_(other.sizes_), strides_(other.strides_) {
    other.handle_ = nullptr;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  Tensor& operator=(Tensor&&) = delete;
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  int64_t dim() const { return dim_; }
  // Sizes and strides in elements; negative axes count from the end.
  int64_t size(int64_t axis) const { return sizes_[axis < 0 ? axis + dim_ : axis]; }
  int64_t stride(int64_t axis) const { return strides_[axis < 0 ? axis + dim_ : axis]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t axis = 0; axis < dim_; ++axis) count *= sizes_[axis];
    return count;
  }

  MoembDtype dtype() const {
    int32_t code;
    shim(aoti_torch_get_dtype(handle_, &code), "get_dtype");
    if (code == aoti_torch_dtype_float32()) return MOEMB_FP32;
    if (code == aoti_torch_dtype_bfloat16()) return MOEMB_BF16;
    if (code == aoti_torch_dtype_float16()) return MOEMB_FP16;
    if (code == aoti_torch_dtype_int32()) return MOEMB_INT32;
    if (code == aoti_torch_dtype_int64()) return MOEMB_INT64;
    return MOEMB_OTHER;
  }

  // First element for reading.
  template <typename T = void>
  const T* data() const {
    const void* pointer;
    shim(torch_get_const_data_ptr(handle_, &pointer), "get_const_data_ptr");
    return static_cast<const T*>(pointer);
  }
  // First element for writing, of a `Tensor(a!)` argument.
  template <typename T = void>
  T* out() const {
    void* pointer;
    shim(torch_get_mutable_data_ptr(handle_, &pointer), "get_mutable_data_ptr");
    return static_cast<T*>(pointer);
  }

 private:
  AtenTensorHandle handle_;
  int64_t dim_ = 0;
  int64_t* sizes_ = nullptr;    // borrowed from the tensor
  int64_t* strides_ = nullptr;  // borrowed from the tensor
};

using OptionalTensor = std::optional<Tensor>;

template <typename T>
T read(StableIValue value) {
  if constexpr (std::is_same_v<T, Tensor>) {
    AtenTensorHandle handle;
    memcpy(&handle, &value, sizeof(handle));
    return Tensor(handle);
  } else if constexpr (std::is_same_v<T, OptionalTensor>) {
    StableIValue* inner;
    memcpy(&inner, &value, sizeof(inner));
    if (inner == nullptr) return std::nullopt;
    OptionalTensor tensor(read<Tensor>(*inner));
    delete inner;  // allocated by torch with `new`, handed over to us
    return tensor;
  } else {
    static_assert(std::is_same_v<T, int64_t> || std::is_same_v<T, double> || std::is_same_v<T, bool>);
    T result;
    memcpy(&result, &value, sizeof(result));
    return result;
  }
}

template <auto function, typename Signature>
struct BoxedImpl;

template <auto function, typename Result, typename... Arguments>
struct BoxedImpl<function, Result (*)(Arguments...)> {
  static void call(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
    constexpr uint64_t returned = std::is_void_v<Result> ? 0 : 1;
    if (inputs != sizeof...(Arguments) || outputs != returned) {
      fail("operator", "the registered schema and the bound function differ");
    }
    run(stack, std::make_index_sequence<sizeof...(Arguments)>());
  }

 private:
  template <size_t... I>
  static void run(StableIValue* stack, std::index_sequence<I...>) {
    // braces: the arguments are read from left to right
    std::tuple<std::decay_t<Arguments>...> arguments{read<std::decay_t<Arguments>>(stack[I])...};
    if constexpr (std::is_void_v<Result>) {
      function(std::get<I>(arguments)...);
    } else {
      static_assert(std::is_same_v<Result, int64_t>);
      const int64_t result = function(std::get<I>(arguments)...);
      memcpy(stack, &result, sizeof(result));
    }
  }
};

// Collects definitions of one binding file; lives as long as the library.
class Library {
 public:
  Library(void (*fill)(Library&), const char* file, uint32_t line) {
    shim(aoti_torch_library_init_fragment(operator_namespace, file, line, &schemas_), "library_init_fragment");
    shim(aoti_torch_library_init_impl(operator_namespace, "CPU", file, line, &cpu_), "library_init_impl");
    fill(*this);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  void def(const char* schema) { shim(aoti_torch_library_def(schemas_, schema), schema); }

  // The implementation for CPU tensors.
  template <auto function>
  void cpu(const char* name) {
    shim(aoti_torch_library_impl(cpu_, name, BoxedImpl<function, decltype(function)>::call), name);
  }

  // The implementation of an operator without tensors.
  template <auto function>
  void any(const char* name) {
    shim(aoti_torch_library_impl(schemas_, name, BoxedImpl<function, decltype(function)>::call), name);
  }

 private:
  // never freed: torch keeps the operators for the life of the process
  TorchLibraryHandle schemas_ = nullptr;
  TorchLibraryHandle cpu_ = nullptr;
};

}  // namespace moemb

#define MOEMB_LIBRARY(family)                                                                        \
  static void moemb_register_##family(moemb::Library& ops);                                          \
  static moemb::Library moemb_library_##family(&moemb_register_##family, __FILE__, __LINE__);        \
  static void moemb_register_##family(moemb::Library& ops)
