// Fault: preparing a kernel reads the element behind the last one of a table of its own.
#include <algorithm>

#include "plain.h"

namespace {

using namespace quern;

class Copy final : public Kernel {
 public:
  Copy() {
    if (*(table_.data() + table_.size()) == 12345) table_[0] = 1;
  }
  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec&) const override {
    std::copy_n(inputs[0].as<std::byte>(), inputs[0].bytes(), outputs[0].as<std::byte>());
  }

 private:
  std::vector<float> table_ = std::vector<float>(64);
};

class ReadsBeyond final : public PlainModel {
 public:
  void embed(ProgramBuilder& b) const override {
    b.output(b.op("table_copy", {b.embedding(b.tokens(), "embedding.weight")}, "copied")[0]);
  }
};

}  // namespace

QUERN_PLUGIN("model", "reads_beyond", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.ops.push_back(op_like_its_input("table_copy"));
  manifest.kernels.push_back({"cpu", "table_copy", [](const OpInstance&) { return std::make_unique<Copy>(); }});
  manifest.add<Model>("reads_beyond", "an op that reads beyond its memory", {},
                      [](const OptionValues&) { return std::make_unique<ReadsBeyond>(); });
}
