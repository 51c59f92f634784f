// What a loss may depend on: its row and, in a causal model, tokens before it in its document.
#include <algorithm>
#include <functional>

#include "conformance/model/model_contracts.h"
#include "conformance/model/model_trial.h"

namespace quern::conformance {

namespace {

template <class T>
void change(std::vector<std::byte>& bytes, std::int64_t begin, std::int64_t end, const std::function<T(T)>& other) {
  auto* values = reinterpret_cast<T*>(bytes.data());
  for (std::int64_t i = begin; i < end; ++i) values[i] = other(values[i]);
}

/// Other inputs at a token: its own elements, or the ones in its row.
void change_inputs(const Plan& plan, Batch& batch, std::int64_t token) {
  const Geometry& geometry = plan.options.geometry;
  if (const auto vocabulary = static_cast<std::int32_t>(plan.model.vocabulary); vocabulary > 0) {
    std::int32_t& word = batch.tokens[static_cast<std::size_t>(token)];
    word = (word + 1) % vocabulary;
  }
  for (auto& [name, bytes] : batch.inputs) {
    const Value& input = *input_named(plan, name);
    const Extents extents = extents_at(input.shape, geometry);
    const std::int64_t size = element_count(extents) / extents[0], in_row = extents[0] / geometry.batch;
    // A row may lack some tokens that the model adds.
    const bool of_token = input.shape[0].per_token > 0;
    const std::int64_t first = of_token ? std::min(token % geometry.sequence, in_row - 1) : 0;
    const std::int64_t begin = (token / geometry.sequence * in_row + first) * size;
    const std::int64_t end = begin + (of_token ? size : in_row * size);
    if (input.dtype == DType::f32)
      change<float>(bytes, begin, end, [](float x) { return x + 1; });
    else if (input.dtype == DType::u8)
      change<std::uint8_t>(bytes, begin, end, [](std::uint8_t x) { return static_cast<std::uint8_t>(x ^ 1); });
    else
      change<std::int32_t>(bytes, begin, end,
                           [&](std::int32_t x) { return static_cast<std::int32_t>((x + 1) % input.below); });
  }
}

/// The sum of the losses of the targets that `counts` names, before and after the inputs at a token change.
void need_unseen(Trial& trial, Batch batch, std::int64_t changed, const std::function<bool(std::int64_t)>& counts,
                 const std::string& who) {
  for (std::size_t i = 0; i < batch.targets.size(); ++i)
    batch.targets[i] = counts(static_cast<std::int64_t>(i)) ? std::max(batch.targets[i], 0) : -1;
  const double want = trial.loss_sum(batch);
  change_inputs(trial.plan(), batch, changed);
  const double got = trial.loss_sum(batch);
  need(got == want, "loss of " + who, number(got) + " after the change, off by " + number(got - want),
       number(want) + ", bit for bit: they must not see it");
}

}  // namespace

std::string check_causal(const Subject& subject) {
  ModelTrial made = fresh_trial(subject);
  made.trial->stir();
  const Geometry geometry = made.trial->plan().options.geometry;
  const std::int64_t row = geometry.sequence;
  const bool is_causal = made.trial->plan().model.causal;
  const Value& targets = *input_named(made.trial->plan(), "targets");
  need(!is_causal || targets.shape[0].per_token > 0, "a model whose traits say causal", "a loss for each row",
       "one for each token; a loss of the whole row depends on its last token");
  for (std::int64_t t = 0; t < row; ++t) {
    const std::int64_t changed = row + t;  // of the second row
    Batch batch = batch_for(*made.trial, 3);
    const bool by_token = static_cast<std::int64_t>(batch.targets.size()) == geometry.tokens();
    need_unseen(
        *made.trial, std::move(batch), changed,
        [&](std::int64_t i) { return (by_token ? i / row : i) != 1 || (by_token && is_causal && i < changed); },
        "targets before and beside position " + std::to_string(t) + " when the inputs there change");
  }
  if (!is_causal) return std::to_string(row) + " positions: no other row sees them; the model is not causal";
  ModelTrial packed = fresh_trial(subject, nullptr, {}, true);
  packed.trial->stir();
  Batch batch = batch_for(*packed.trial, 3);
  const std::int64_t second = (row + 1) / 2;
  batch.documents.clear();
  for (std::int64_t start = 0; start < geometry.tokens(); start += row) {
    batch.documents.push_back(static_cast<std::int32_t>(start));
    if (second < row) batch.documents.push_back(static_cast<std::int32_t>(start + second));
    for (std::int64_t i = second; i < row; ++i)
      batch.positions[static_cast<std::size_t>(start + i)] = static_cast<std::int32_t>(i - second);
  }
  batch.documents.push_back(static_cast<std::int32_t>(geometry.tokens()));
  need_unseen(
      *packed.trial, batch, 0, [&](std::int64_t i) { return i >= second; },
      "a second document when the first one changes");
  return std::to_string(row) + " positions, and packed documents";
}

}  // namespace quern::conformance
