#pragma once
// Cross-entropy over rows of logits, with its gradient in place, and the sums of a step's losses. In training a row is
// read from memory once: a block holds it in shared memory and registers between the softmax's sum and the gradient.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "quern/dtype.h"
#include "runtime/kernels.h"

namespace quern::cuda {

/// Logits (rows, vocabulary) are in rows of `stride` elements that begin at 16-byte addresses.
struct CrossEntropy {
  DType dtype = DType::bf16;
  std::int64_t vocabulary = 0, stride = 0;
  float z_loss = 0, seed = 1;
  float cap = 0;  ///< soft cap of the logits; 0: none
  bool train = false;
  DType gradient_format = DType::f32;  ///< e4m3, e5m2: gradients are quantized, for a vocabulary of a multiple of 8,
  float gradient_scale = 1;            ///< times this power of two

  int threads = 0;
  int shared_rounds = 0;  ///< packs of 16 bytes that each thread keeps in shared memory
};

/// Row stride that suits packs: the vocabulary rounded up.
std::int64_t logit_stride(std::int64_t vocabulary, DType dtype);
/// Chooses the launch for a GPU and loads the kernel.
CrossEntropy make_cross_entropy(DType dtype, std::int64_t vocabulary, bool train, DType gradient_format, float cap,
                                const CudaTraits& gpu);

/// Logits are capped first: cap tanh(logit / cap). losses[n] (may be null) = logsumexp - logit of targets[n]; in
/// training the logits become seed * (softmax - onehot + 2 z_loss logsumexp softmax), times the cap's slope. A target
/// of -1 gives zeros, one out of range a NaN loss. Where the plan has a gradient format, the gradients go to `codes`
/// (rows, vocabulary) instead, null otherwise.
void cross_entropy(const CrossEntropy& plan, void* logits, std::uint8_t* codes, const std::int32_t* targets,
                   float* losses, std::int64_t rows, cudaStream_t stream);

/// What a launch of loss_stats adds up.
struct LossTerm {
  double weight = 1;
  bool counts = true;  ///< also the targets that count
};
/// stats[0] (+)= weight times the sum of losses whose targets count, stats[1] (+)= their number, stats[2] (+)= the sum
/// of `correct` over them (may be null), stats[3] = 0 unless added to.
void add_loss_stats(const float* losses, const std::int32_t* targets, const float* correct, std::int64_t count,
                    double* stats, const LossTerm& term, bool add, cudaStream_t stream);
/// gradient[i] = factor where targets[i] counts, otherwise 0.
void loss_stats_gradient(const std::int32_t* targets, std::int64_t count, float factor, float* gradient,
                         cudaStream_t stream);

}  // namespace quern::cuda
