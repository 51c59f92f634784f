#pragma once
// The head's ops: patch_mean, the mean over the tokens of each row, (N, C) to (B, C), and smooth_loss, cross-entropy
// with label smoothing, (B, K) and (B) labels to (B) f32. Both have ordinary gradients, so any head may use them. And
// what keeps a running mean: pooled_sums, centred and advance_mean, see ops.cpp.

#include "quern/plugin.h"

namespace patch_classifier {

/// Declares the ops and their kernels.
void add_ops(quern::Manifest& manifest);

}  // namespace patch_classifier
