#pragma once
// A borrowed, typed view of memory, for kernels, communicators and stores.

#include <cstddef>
#include <cstdint>

#include "quern/shape.h"

namespace quern {

/// Row-major, contiguous, not owned. `data` is null for an absent operand or an output that no op reads.
struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  Extents extents;

  std::int64_t count() const { return element_count(extents); }
  std::size_t bytes() const { return static_cast<std::size_t>(byte_count(extents, dtype)); }
  /// Size of the last dimension, and of all others together.
  std::int64_t columns() const { return extents.empty() ? 1 : extents.back(); }
  std::int64_t rows() const { return columns() == 0 ? 0 : count() / columns(); }
  explicit operator bool() const { return data != nullptr; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace quern
