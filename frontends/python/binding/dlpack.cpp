// Frees DLPack tensors that no library took. Python's functions are looked up in the process that loaded this library,
// which is built for any version of Python.
#include <dlfcn.h>

#include <cstdint>

namespace {

/// DLManagedTensor of https://dmlc.github.io/dlpack
struct ManagedTensor {
  void* data;
  std::int32_t device_type, device_id, ndim;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
  void* context;
  void (*deleter)(ManagedTensor*);
};

template <class Function>
Function* python(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

}  // namespace

/// A PyCapsule_Destructor. The deleter is a Python function, which must not run while an exception is on its way: a
/// library that refuses the tensor lets the capsule go with one.
extern "C" __attribute__((visibility("default"))) void quern_destroy_capsule(void* capsule) {
  constexpr const char* kName = "dltensor";
  void *type = nullptr, *value = nullptr, *trace = nullptr;
  python<void(void**, void**, void**)>("PyErr_Fetch")(&type, &value, &trace);
  if (python<int(void*, const char*)>("PyCapsule_IsValid")(capsule, kName) != 0) {
    auto* const tensor =
        static_cast<ManagedTensor*>(python<void*(void*, const char*)>("PyCapsule_GetPointer")(capsule, kName));
    tensor->deleter(tensor);
  }
  python<void(void*, void*, void*)>("PyErr_Restore")(type, value, trace);
}
