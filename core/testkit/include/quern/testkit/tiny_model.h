#pragma once
// A small decoder and a plain precision backend for tests of the core, so that they need no plugin.

#include <string>
#include <vector>

#include "quern/model.h"
#include "quern/precision.h"

namespace quern::testkit {

/// A decoder with grouped-query attention; every option changes the program's form.
struct TinyModelOptions {
  std::int64_t layers = 2, width = 16, vocabulary = 37, heads = 4, kv_heads = 2, head_dim = 4, ffn = 24;
  bool tied = false;
  bool bias = false;
  bool head_norm = false;
  bool parallel = false;    ///< attention and feed-forward both read the block's input
  bool layer_norm = false;  ///< layer_norm and gelu in place of rms_norm and swiglu
  Gelu gelu = Gelu::tanh;
  std::int64_t window = 0;               ///< layers 1, 3, ... see so many keys; 0: all layers are alike
  std::vector<std::string> frozen = {};  ///< parameters, by the beginnings of their names
};

class TinyModel : public Model {
 public:
  explicit TinyModel(TinyModelOptions options = {}) : o_(options) {}
  ModelTraits traits() const override { return {o_.layers, o_.width, o_.vocabulary, 4096}; }
  std::vector<ParameterSpec> parameters() const override;
  void embed(ProgramBuilder& b) const override;
  std::int64_t block_kind(std::int64_t layer) const override { return o_.window > 0 ? layer % 2 : 0; }
  void block(ProgramBuilder& b, std::int64_t layer) const override;
  void head(ProgramBuilder& b) const override;
  std::string hf_config() const override { return "{}"; }

 private:
  ValueId norm(ProgramBuilder& b, ValueId x, const std::string& name) const;
  TinyModelOptions o_;
};

/// Plain matmuls, everything in one dtype.
class PlainPrecision : public PrecisionBackend {
 public:
  explicit PlainPrecision(DType dtype = DType::f32) : traits_{dtype, dtype, dtype} {}
  const PrecisionTraits& traits() const override { return traits_; }
  void lower(const ProductSite& site, Lowering& lowering) const override;

 private:
  PrecisionTraits traits_;
};

}  // namespace quern::testkit
