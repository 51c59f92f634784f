#pragma once
// What every timing at prepare shares: events around the work, and as many sets of operands as leave none in the cache.

#include <cuda_runtime_api.h>

#include <cstddef>

#include "runtime/check.h"

namespace quern::cuda {

/// Sets of operands of `set_bytes` such that a run that takes the next one finds none of it in an L2 cache of that
/// size, as most ops in training find none of theirs. Between two runs of a set are all others, at least one cache
/// full; of more than two a set itself is as much.
constexpr std::size_t sets_beyond(std::size_t l2_bytes, std::size_t set_bytes) { return 1 + 2 * l2_bytes / set_bytes; }

/// Two events on a stream.
class EventTimer {
 public:
  explicit EventTimer(cudaStream_t stream) : stream_(stream) {
    QUERN_CUDA(cudaEventCreate(&from_));
    QUERN_CUDA(cudaEventCreate(&to_));
  }
  ~EventTimer() {
    cudaEventDestroy(from_);
    cudaEventDestroy(to_);
  }
  EventTimer(const EventTimer&) = delete;
  EventTimer& operator=(const EventTimer&) = delete;

  void start() const { QUERN_CUDA(cudaEventRecord(from_, stream_)); }
  void stop() const { QUERN_CUDA(cudaEventRecord(to_, stream_)); }
  /// From start to stop, on the device. Waits for it.
  float milliseconds() const {
    QUERN_CUDA(cudaEventSynchronize(to_));
    float milliseconds = 0;
    QUERN_CUDA(cudaEventElapsedTime(&milliseconds, from_, to_));
    return milliseconds;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t from_ = nullptr, to_ = nullptr;
};

}  // namespace quern::cuda
