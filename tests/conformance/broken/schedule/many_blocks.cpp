// No fault, but more blocks of memory at a time than the kit guards.
#include <memory>
#include <vector>

#include "quern/plugin.h"

namespace {

class ManyBlocks final : public quern::Schedule {
 public:
  double factor(std::int64_t step, std::int64_t steps) const override {
    while (blocks_.size() < 21'000) blocks_.push_back(std::make_unique<int>(0));
    return 1 - static_cast<double>(step) / static_cast<double>(steps);
  }

 private:
  mutable std::vector<std::unique_ptr<int>> blocks_;
};

}  // namespace

QUERN_PLUGIN("schedule", "many_blocks", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Schedule>("many_blocks", "linear", {},
                                [](const quern::OptionValues&) { return std::make_unique<ManyBlocks>(); });
}
