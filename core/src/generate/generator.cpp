#include "generate/generator.h"

#include <algorithm>

#include "generate/sampling.h"
#include "quern/error.h"

namespace quern {

namespace {

/// The micro-batch: what each row holds, and of which prompt. Attention is causal, so what stands behind a row's last
/// token is not seen; it is token 0 at position 0.
class Rows {
 public:
  explicit Rows(const Geometry& geometry)
      : sequence_(geometry.sequence), prompts_(static_cast<std::size_t>(geometry.batch), kFree), lengths_(prompts_) {
    const auto tokens = static_cast<std::size_t>(geometry.tokens());
    batch_.tokens.resize(tokens);
    batch_.targets.assign(tokens, -1);
    batch_.positions.resize(tokens);
    for (std::size_t row = 0; row < prompts_.size(); ++row) clear(row);
  }

  std::size_t count() const { return prompts_.size(); }
  bool is_free(std::size_t row) const { return prompts_[row] == kFree; }
  std::size_t prompt(std::size_t row) const { return static_cast<std::size_t>(prompts_[row]); }
  std::int64_t length(std::size_t row) const { return lengths_[row]; }

  void put(std::size_t row, std::size_t prompt, const std::vector<std::int32_t>& tokens) {
    clear(row);
    prompts_[row] = static_cast<std::int64_t>(prompt);
    lengths_[row] = 0;
    for (std::int32_t token : tokens) append(row, token);
  }
  void append(std::size_t row, std::int32_t token) {
    if (lengths_[row] == sequence_) fail_internal("generate", "a text is longer than the plan's sequence");
    const std::size_t at = row * static_cast<std::size_t>(sequence_) + static_cast<std::size_t>(lengths_[row]);
    batch_.tokens[at] = token;
    batch_.positions[at] = static_cast<std::int32_t>(lengths_[row]++);
  }
  /// One token long, so that it has a last one.
  void clear(std::size_t row) {
    auto begin = static_cast<std::ptrdiff_t>(row) * sequence_;
    std::fill_n(batch_.tokens.begin() + begin, sequence_, 0);
    std::fill_n(batch_.positions.begin() + begin, sequence_, 0);
    prompts_[row] = kFree;
    lengths_[row] = 1;
  }

  std::vector<float> next_logits(Engine& engine) const {
    std::vector<std::int32_t> last;
    for (std::size_t row = 0; row < count(); ++row)
      last.push_back(static_cast<std::int32_t>(static_cast<std::int64_t>(row) * sequence_ + lengths_[row] - 1));
    return engine.next_logits(batch_, last);
  }

 private:
  static constexpr std::int64_t kFree = -1;
  std::int64_t sequence_;
  std::vector<std::int64_t> prompts_, lengths_;  // by row
  Batch batch_;
};

}  // namespace

std::vector<Continuation> generate(Engine& engine, std::span<const Prompt> prompts, const GenerateSettings& settings,
                                   const TokenHandler& on_token, const StopQuestion& stopped) {
  std::vector<Continuation> made(prompts.size());
  if (settings.max_tokens < 1) return made;
  const auto vocabulary = static_cast<std::size_t>(engine.plan().model.vocabulary);
  Rows rows(engine.plan().options.geometry);
  std::size_t waiting = 0, open = 0;
  for (;;) {
    for (std::size_t row = 0; row < rows.count() && waiting < prompts.size(); ++row) {
      if (!rows.is_free(row)) continue;
      rows.put(row, waiting, prompts[waiting].tokens);
      ++waiting, ++open;
    }
    if (open == 0 || (stopped && stopped())) return made;
    const std::vector<float> logits = rows.next_logits(engine);
    for (std::size_t row = 0; row < rows.count(); ++row) {
      if (rows.is_free(row)) continue;
      const std::size_t prompt = rows.prompt(row);
      Continuation& text = made[prompt];
      const std::int32_t token =
          sample_token(std::span(logits).subspan(row * vocabulary, vocabulary), settings.sampling,
                       static_cast<std::uint32_t>(prompt), static_cast<std::uint32_t>(rows.length(row)));
      const bool stops = std::find(settings.stop.begin(), settings.stop.end(), token) != settings.stop.end();
      if (stops) {
        text.finish = Finish::stop;
      } else {
        text.tokens.push_back(token);
        if (on_token) on_token(prompt, token);
      }
      if (stops || static_cast<std::int64_t>(text.tokens.size()) == settings.max_tokens) {
        rows.clear(row);
        --open;
      } else {
        rows.append(row, token);
      }
    }
  }
}

}  // namespace quern
