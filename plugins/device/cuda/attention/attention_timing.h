#pragma once
// Times ways to run attention on scratch memory, at prepare.

#include <cstddef>
#include <functional>

#include "attention/attention.h"

namespace quern::cuda {

/// Bytes that a pass reads and writes, its workspace aside.
std::size_t attention_set_bytes(const AttentionShape& shape, AttentionPass pass);

/// Operands of a pass in one allocation, random and with logsumexps of zero, in several sets; one workspace for all.
class AttentionScratch {
 public:
  /// So many sets that no run finds its own in the L2 cache (timing.h), or as many as there is memory for.
  AttentionScratch(const AttentionShape& shape, AttentionPass pass, std::size_t workspace, CudaContext& context);
  ~AttentionScratch();
  AttentionScratch(const AttentionScratch&) = delete;
  AttentionScratch& operator=(const AttentionScratch&) = delete;

  std::size_t sets() const { return sets_; }  ///< 0: there is no memory
  bool cold() const { return cold_; }         ///< there are all that it takes
  AttentionOperands operands(std::size_t set) const;

 private:
  AttentionShape shape_;
  AttentionPass pass_;
  std::size_t sets_ = 0;
  bool cold_ = false;
  void* memory_ = nullptr;
  AttentionOperands operands_;  ///< of the first set
};

/// Milliseconds of one run of `body`, which enqueues on `stream`: the best of three rounds.
float best_of_rounds(cudaStream_t stream, const std::function<void()>& body);

}  // namespace quern::cuda
