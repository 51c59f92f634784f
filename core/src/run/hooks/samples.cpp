#include "run/hooks/samples.h"

#include "generate/prompts.h"
#include "quern/error.h"
#include "run/inference.h"

namespace quern {

Samples::Samples(const Session& session) : every_(session.sample.every) {
  if (every_ == 0) return;
  const SampleOptions& options = session.sample;
  for (const std::string& entry : options.prompts)
    for (Prompt& prompt : prompts_of(entry, session.config.where("sample", "prompts")))
      prompts_.push_back(std::move(prompt));
  check_prompts(prompts_, session.model->traits().vocabulary, options.max_tokens, session.train.sequence,
                "train.sequence");
  settings_.max_tokens = options.max_tokens;
  settings_.sampling = {options.temperature, options.top_p, static_cast<std::uint64_t>(session.train.seed)};
  settings_.stop = end_tokens(session);
}

void Samples::between_steps(const RunState& state) {
  if (every_ == 0 || state.step % every_ != 0 || state.interrupted()) return;
  state.engine.apply_update();
  state.engine.with(Weights::evaluated, [&] {
    for (const LogEvent& event : take(state.engine, state.step, state.interrupted)) state.log.write(event);
  });
}

std::vector<LogEvent> Samples::take(Engine& engine, std::int64_t step, const StopQuestion& stopped) const {
  std::vector<LogEvent> events;
  std::vector<Continuation> made;
  try {
    made = generate(engine, prompts_, settings_, {}, stopped);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::numerics) throw;
    return {{"warning", {{"text", "no samples of step " + std::to_string(step) + ": " + error.what()}}}};
  }
  if (stopped()) return events;
  for (std::size_t i = 0; i < made.size(); ++i)
    events.push_back({"sample",
                      {{"step", step},
                       {"prompt", static_cast<std::int64_t>(i)},
                       {"prompt_tokens", tokens_text(prompts_[i].tokens)},
                       {"tokens", tokens_text(made[i].tokens)},
                       {"finish", std::string(made[i].finish == Finish::stop ? "stop" : "length")}}});
  return events;
}

}  // namespace quern
