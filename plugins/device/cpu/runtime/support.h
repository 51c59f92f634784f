#pragma once
// What the ops' queries and launches share: checks of indices, pieces of a workspace.

#include <cstddef>
#include <cstdint>

#include "quern/device.h"

namespace quern::cpu {

/// Token ids or targets out of [lowest, vocabulary) are an input error that names the first.
void check_indices(const View& indices, std::int32_t lowest, std::int64_t vocabulary, const char* what);

/// Bytes of `count` floats, rounded up so that what follows stays aligned.
constexpr std::size_t float_bytes(std::int64_t count) {
  return (static_cast<std::size_t>(count) * 4 + 255) / 256 * 256;
}

/// Hands out consecutive aligned pieces of a workspace.
class Workspace {
 public:
  explicit Workspace(void* memory) : next_(static_cast<char*>(memory)) {}
  float* floats(std::int64_t count) {
    char* piece = next_;
    next_ += float_bytes(count);
    return reinterpret_cast<float*>(piece);
  }
  std::int32_t* integers(std::int64_t count) { return reinterpret_cast<std::int32_t*>(floats(count)); }

 private:
  char* next_;
};

/// All of a view as floats: in place when it is f32, else converted into `panel` by all threads.
const float* load_all(const View& view, float* panel);

}  // namespace quern::cpu
