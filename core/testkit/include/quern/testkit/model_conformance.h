#pragma once
// What every model must satisfy, whoever wrote it.

#include <string>
#include <vector>

#include "quern/model.h"

namespace quern::testkit {

/// Writes the model's programs and compares them with its parameters and traits. One text a fault; empty when the
/// model is sound: shapes agree, each program uses what its group may use, every parameter is used and well formed, and
/// layers of one `block_kind` have one program. `custom_ops` are op kinds of the model's own plugin.
std::vector<std::string> model_faults(const Model& model, DType activation_dtype = DType::bf16,
                                      const std::vector<OpSpec>& custom_ops = {});

/// The model's programs as text: embed, the block of each kind, head.
std::string model_programs(const Model& model, const std::vector<OpSpec>& custom_ops = {});

/// Trainable numbers of the whole model, all layers.
std::int64_t parameter_count(const Model& model);

}  // namespace quern::testkit
