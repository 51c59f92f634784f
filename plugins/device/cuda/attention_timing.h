#pragma once
// Times ways to run attention on scratch memory, at prepare.

#include <functional>

#include "attention.h"

namespace quern::cuda {

/// Operands of both passes in one allocation, random and with logsumexps of zero; empty when there is no memory.
class AttentionScratch {
 public:
  AttentionScratch(const AttentionShape& shape, std::size_t workspace, cudaStream_t stream);
  ~AttentionScratch();
  AttentionScratch(const AttentionScratch&) = delete;
  AttentionScratch& operator=(const AttentionScratch&) = delete;
  explicit operator bool() const { return memory_ != nullptr; }
  const AttentionOperands& operands() const { return operands_; }

 private:
  void* memory_ = nullptr;
  AttentionOperands operands_;
};

/// Milliseconds of one run of `body`, which enqueues on `stream`: the best of three rounds.
float best_of_rounds(cudaStream_t stream, const std::function<void()>& body);

}  // namespace quern::cuda
