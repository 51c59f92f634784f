#pragma once
// For tests of attention: both passes on the CPU device and on the GPU, compared. Each device's gradient reads its own
// logsumexp, whose layout is the device's business.

#include <cstdint>
#include <string>
#include <vector>

#include "tests/device_pair.h"

namespace quern::cuda {

struct AttentionCase {
  std::int64_t batch, sequence, heads, kv_heads, head_dim;
  const char* mask = "causal";
  std::vector<std::int32_t> documents = {};  ///< starts, padded here to N + 1
  std::int64_t chunk = 0;                    ///< sequences at once, at most; 0: as the device likes
  double sharpness = 1;                      ///< times the usual scale
  std::int64_t window = 0;                   ///< 0: none
  double cap = 0;                            ///< 0: none
  std::int64_t tokens() const { return batch * sequence; }
  Extents packed() const { return {tokens(), (heads + 2 * kv_heads) * head_dim}; }
  Extents width() const { return {tokens(), heads * head_dim}; }
  std::string label() const {
    return to_string(Extents{batch, sequence, heads, kv_heads, head_dim}) + " " + mask +
           (documents.empty() ? "" : ", documents") + (window > 0 ? ", window " + std::to_string(window) : "") +
           (cap > 0 ? ", capped" : "");
  }
};

struct AttentionResults {
  testkit::PoisonedTensor y, logsumexp, dqkv;
};

class DeviceBuffer {
 public:
  DeviceBuffer(Device& device, std::size_t bytes)
      : device_(device), memory(device.allocate(MemoryKind::device, bytes)) {}
  ~DeviceBuffer() { device_.release(MemoryKind::device, memory); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

 private:
  Device& device_;

 public:
  void* const memory;
};

enum class How { eager, captured };

AttentionResults attend(Device& device, const AttentionCase& c, DType dtype, How how = How::eager);

/// Checks the GPU's results against the CPU's, and that they have the same bits again and captured. `products`:
/// multiplications of tensor cores, for what an emulator can afford; 0 where there are none.
void compare(DevicePair& pair, const AttentionCase& c, DType dtype, std::int64_t products = 0);

/// The GPU with that choice of option `attention`.
DevicePair open_pair_by(const char* attention);

}  // namespace quern::cuda
