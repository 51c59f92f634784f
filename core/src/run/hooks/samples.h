#pragma once
// Continuations of a run's prompts, taken between steps: one event "sample" a prompt, with tokens as text "1,2,3".
// Draws depend on the run's seed and not on the step, so that samples of two steps differ by learning alone.

#include <cstdint>
#include <vector>

#include "generate/generator.h"
#include "run/hooks/hook.h"

namespace quern {

class Samples final : public Hook {
 public:
  /// Reads and checks the prompts, when the run is to have samples.
  explicit Samples(const Session& session);

  void between_steps(const RunState& state) override;
  /// None when `stopped` became true meanwhile, and a warning instead of texts when logits are not finite: that is for
  /// the guard to judge, at the next step.
  std::vector<LogEvent> take(Engine& engine, std::int64_t step, const StopQuestion& stopped) const;

 private:
  std::int64_t every_;
  std::vector<Prompt> prompts_;
  GenerateSettings settings_;
};

}  // namespace quern
