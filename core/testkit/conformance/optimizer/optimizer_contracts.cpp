// Of optimizers and schedules, on a small model on the oracle.
#include <cmath>
#include <cstring>
#include <set>

#include "base/format.h"
#include "conformance/contracts.h"
#include "conformance/harness/trial.h"
#include "conformance/optimizer/update_run.h"
#include "conformance/option_effects.h"
#include "optimizer/update_traits.h"
#include "quern/numeric.h"
#include "quern/step_state.h"
#include "quern/testkit/independence.h"
#include "quern/testkit/op_launch.h"
#include "quern/testkit/tiny_model.h"

namespace quern::conformance {

namespace {

struct Made {
  std::unique_ptr<Device> device;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Trial> trial;
};

Made fresh(const Subject& subject, const Model& model, DType master = DType::f32) {
  Made made{oracle(subject.host), subject.make<Optimizer>(), nullptr};
  PlanOptions options;
  options.master = master;
  options.geometry = {4, 8};
  made.trial =
      std::make_unique<Trial>(subject.host, TrialParts{model, *made.device, nullptr, made.optimizer.get()}, options);
  return made;
}

std::string learns(const Subject& subject, const Model& model) {
  Made made = fresh(subject, model);
  Engine& engine = made.trial->engine();
  const Batch batch = random_batch({4, 8}, model.traits().vocabulary, 9);
  const double first = made.trial->loss(batch);
  StepState state{.learning_rate = 1e-2f, .clip_norm = 1.0f};
  for (; state.step < 30; state.updates = ++state.step) {
    state.average = 1.0f / static_cast<float>(state.step + 1);
    engine.micro_step(batch, state);
    engine.update();
    engine.result();
  }
  const double last = made.trial->loss(batch);
  need(last < first, "loss of a batch after 30 steps on it at rate 0.01", number(last), "less than " + number(first));
  return number(first) + " to " + number(last) + " nats in 30 steps";
}

/// A step whose gradient is not finite changes nothing.
std::string skips(const Subject& subject, const Model& model) {
  Made made = fresh(subject, model);
  std::vector<float> norm = made.trial->tensor("master", "final_norm.weight", -1);
  norm[0] = std::nanf("");
  made.trial->write("master", "final_norm.weight", -1, norm);
  const State before = made.trial->state();
  made.trial->train(0, 1);
  const std::string changed = first_difference(made.trial->state(), before);
  need(changed.empty(), changed + " after a step whose gradient is NaN", "changed", "as before");
  return "";
}

/// At a learning rate of zero the weights stay, whatever the state does.
std::string keeps_to_rate(const Subject& subject, const Model& model) {
  Made made = fresh(subject, model);
  made.trial->train(0, 2);  // moments are not zero then
  const Tensors before = made.trial->all("master");
  made.trial->engine().micro_step(random_batch({4, 8}, model.traits().vocabulary, 9),
                                  {.step = 2, .clip_norm = 1.0f, .updates = 2});
  made.trial->engine().update();
  made.trial->engine().result();
  const std::string changed = first_difference(made.trial->all("master"), before);
  need(changed.empty(), "master weights of " + changed + " after a step at rate 0", "changed", "as before");
  return "";
}

/// Under gradients that are not small anywhere each element of each master changes.
std::string changes_all(const Subject& subject, const Model& model) {
  Made made = fresh(subject, model);
  made.trial->train(0, 1);
  Engine& engine = made.trial->engine();
  engine.micro_step(random_batch({4, 8}, model.traits().vocabulary, 9),
                    {.step = 1, .learning_rate = 1e-2f, .updates = 1});
  for (const PlannedTensor& tensor : made.trial->plan().tensors) {
    if (tensor.kind != "gradient") continue;
    std::vector<float> sums = testkit::random_normal(tensor.bytes() / static_cast<std::int64_t>(sizeof(float)), 3, 100);
    for (float& sum : sums) sum += sum < 0 ? -100.0f : 100.0f;
    made.trial->write("gradient", tensor.parameter, tensor.layer, sums);
  }
  const Tensors before = made.trial->all("master");
  engine.update();
  engine.result();
  std::size_t elements = 0;
  for (const auto& [name, after] : made.trial->all("master"))
    for (std::size_t i = 0; i < after.size(); ++i, ++elements)
      need(after[i] != before.at(name)[i],
           "element " + std::to_string(i) + " of " + std::to_string(after.size()) + " of " + name +
               " after a step whose gradients are large everywhere",
           "as before", "another value");
  return std::to_string(elements) + " elements";
}

/// Sums of gradients that are `factor`, a power of two, times as large over as many times the tokens are the same mean.
State after_scaled_sums(const Subject& subject, const Model& model, float factor) {
  Made made = fresh(subject, model);
  made.trial->train(0, 1);
  Engine& engine = made.trial->engine();
  engine.micro_step(random_batch({4, 8}, model.traits().vocabulary, 9),
                    {.step = 1, .learning_rate = 1e-2f, .clip_norm = 1.0f, .updates = 1});
  for (const PlannedTensor& tensor : made.trial->plan().tensors) {
    if (tensor.kind != "gradient") continue;
    std::vector<float> sums = made.trial->tensor("gradient", tensor.parameter, tensor.layer);
    for (float& sum : sums) sum *= factor;
    made.trial->write("gradient", tensor.parameter, tensor.layer, sums);
  }
  const PlannedTensor& stats_tensor = made.trial->plan().tensor({"loss_stats"});
  LossStats stats;
  engine.read(stats_tensor, &stats);
  stats.valid_tokens *= factor;
  engine.write(stats_tensor, &stats);
  engine.update();
  engine.result();
  return made.trial->state();
}

std::string scales_gradients(const Subject& subject, const Model& model) {
  const State want = after_scaled_sums(subject, model, 1);
  for (float factor : {0x1p-4f, 2.0f, 0x1p10f}) {
    const std::string differs = first_difference(after_scaled_sums(subject, model, factor), want);
    need(differs.empty(),
         differs + " after gradient sums " + number(factor) + " times as large, gradient_scale divided", "other bits",
         "the same");
  }
  return "";
}

std::string optimizer_resumes(const Subject& subject, const Model& model) {
  std::vector<Made> made;
  made.reserve(4);
  return resumes([&] {
    made.push_back(fresh(subject, model));
    return std::move(made.back().trial);
  });
}

// ---- locality: the update op on parts of a tensor beside the same op on all of it ----

std::size_t bytes_of_row(const View& view) { return view.bytes() / static_cast<std::size_t>(view.extents[0]); }

/// Rows alone, in parts of several sizes that a device aligns, equal the whole's.
void rows_alone(const UpdateRun& run, const Extents& extents, const std::string& who) {
  const std::vector<PoisonedTensor> whole = run.run();
  for (const std::int64_t rows : {std::int64_t{16}, std::int64_t{48}})
    for (std::int64_t first = 0; first < extents[0]; first += rows) {
      const std::int64_t taken = std::min(rows, extents[0] - first);
      const std::vector<PoisonedTensor> part = run.run(first, taken);
      for (std::size_t o = 0; o < whole.size(); ++o) {
        const View &got = part[o].view(), &want = whole[o].view();
        const char* from = want.as<char>() + static_cast<std::size_t>(first) * bytes_of_row(want);
        need(std::memcmp(got.data, from, got.bytes()) == 0,
             who + ": rows " + std::to_string(first) + " to " + std::to_string(first + taken - 1) + " of output " +
                 std::to_string(o) + ", updated without the others",
             "other bits", "the whole's");
      }
    }
}

/// A change of one element of an operand changes what `locality` allows.
void reaches(UpdateRun& run, UpdateLocality locality, const std::string& who) {
  const std::vector<PoisonedTensor> before = run.run();
  const std::size_t outputs = run.operands() - 1;  // of a tensor
  for (std::size_t i = 0; i < run.operands(); ++i) {
    const PoisonedTensor kept = run.operand(0, i);
    const Extents extents = kept.view().extents;
    const std::int64_t changed_row = extents[0] / 2, row = element_count(extents) / extents[0];
    const auto element = static_cast<std::size_t>(changed_row * row + row / 3);
    std::vector<float> values = kept.floats();
    values[element] = values[element] * 3 + 1;
    run.operand(0, i) = PoisonedTensor(kept.view().dtype, extents, values);
    const std::vector<PoisonedTensor> after = run.run();
    run.operand(0, i) = kept;
    for (std::size_t o = 0; o < after.size(); ++o) {
      const View &got = after[o].view(), &want = before[o].view();
      const std::size_t size = size_of(got.dtype), of_row = static_cast<std::size_t>(got.count() / got.extents[0]);
      const bool same_row = locality == UpdateLocality::row || got.extents != extents;
      for (std::size_t k = 0; k < static_cast<std::size_t>(got.count()); ++k) {
        const bool own = o < outputs && (locality == UpdateLocality::matrix || k == element ||
                                         (same_row && static_cast<std::int64_t>(k / of_row) == changed_row));
        need(own || std::memcmp(got.as<char>() + k * size, want.as<char>() + k * size, size) == 0,
             who + ": element " + std::to_string(k) + " of output " + std::to_string(o) + " after a change of " +
                 run.name_of(i) + "'s element " + std::to_string(element) + " of the first tensor",
             "other bits", "as before");
      }
    }
  }
}

/// What the ops state to depend on is all that they depend on, and tensors of one launch on none of another.
std::string local(const Subject& subject) {
  auto device = oracle(subject.host);
  auto optimizer = subject.make<Optimizer>();
  OpSet ops = builtin_ops();
  for (const OpSpec& spec : subject.host.ops()) ops.add(spec);
  std::set<std::string> stated;
  for (const auto group : {ParameterGroup::embedding, ParameterGroup::block, ParameterGroup::head})
    for (const ParameterSpec& spec :
         {matrix("w", group, "w", 80, 24), matrix("tall", group, "tall", 96, 4), matrix("wide", group, "wide", 64, 300),
          vector("v", group, "v", 96, Init::Kind::ones)}) {
      const UpdateTraits traits = update_traits(*optimizer, spec, ops);
      const char* names[] = {"element", "row", "matrix"};
      const std::string name = names[static_cast<std::size_t>(traits.locality)];
      std::set<std::string> kinds;
      for (const Op& op : traits.ops) kinds.insert(op.kind);
      const std::string kinds_text = format_list({kinds.begin(), kinds.end()});
      const std::string who = "op " + kinds_text + ", which states locality " + name;
      UpdateRun run(*device, ops, *optimizer, spec);
      run.add(1);
      run.add(2);
      reaches(run, traits.locality, who);
      if (traits.splits()) rows_alone(run, spec.extents, who);
      stated.insert(kinds_text + ": " + name);
    }
  return format_list({stated.begin(), stated.end()});
}

/// Masters in bf16 are rounded up or down by chance, with a draw for each element: rounding to nearest loses updates
/// smaller than half a unit.
std::string rounds_masters(const Subject& subject, const Model& model) {
  try {
    fresh(subject, model, DType::bf16);
  } catch (const Error& error) {
    need(error.code() == ErrorCode::config, "masters in bf16", error.what(), "a plan, or a config error");
    return std::string("refused: ") + error.what();
  }
  auto device = oracle(subject.host);
  auto optimizer = subject.make<Optimizer>();
  OpSet ops = builtin_ops();
  for (const OpSpec& spec : subject.host.ops()) ops.add(spec);
  const ParameterSpec spec = matrix("w", ParameterGroup::block, "w", 256, 128);
  UpdateRun exact(*device, ops, *optimizer, spec), rounded(*device, ops, *optimizer, spec, DType::bf16);
  for (UpdateRun* run : {&exact, &rounded})
    for (int tensor : {0, 1}) static_cast<void>(tensor), run->add_equal();
  const std::vector<PoisonedTensor> got = rounded.run(), want = exact.run();
  std::vector<double> draws[2];
  for (std::size_t tensor : {0, 1}) {
    const std::size_t master = tensor * (exact.operands() - 1);
    const std::vector<float> values = want[master].floats(), results = got[master].floats();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float low = bf16_to_float(float_to_bf16_stochastic(values[i], 0)),
                  high = bf16_to_float(float_to_bf16_stochastic(values[i], 0xffff));
      const std::string where = "element " + std::to_string(i) + " of a bf16 master, " + number(values[i]) + " in fp32";
      need(results[i] == low || results[i] == high, where, number(results[i]), number(low) + " or " + number(high));
      const double up = low == high ? 0.5 : (double{values[i]} - low) / (double{high} - low);
      if (up < 0.05 || up > 0.95)
        throw Skipped("the first step ends near bf16's own values, whose rounding says nothing");
      draws[tensor].push_back(((results[i] == high ? 1 : 0) - up) / std::sqrt(up * (1 - up)));
    }
    const std::string found = testkit::dependence(draws[tensor]);
    need(found.empty(), "roundings of a bf16 master's elements", found, "up by chance, a draw for each element");
  }
  const std::string found = testkit::dependence(draws[0], draws[1]);
  need(found.empty(), "roundings of two tensors", found, "draws of their own");
  return std::to_string(2 * draws[0].size()) + " elements";
}

/// States are the same whoever says them, and finite; two trainings side by side are each as one alone.
std::string side_by_side(const Subject& subject, const Model& model) {
  auto one = subject.make<Optimizer>(), other = subject.make<Optimizer>();
  auto text_of = [](const std::vector<OptimizerState>& states) {
    std::string text;
    for (const OptimizerState& state : states)
      text += state.name + " " + std::string(name_of(state.dtype)) + " " + to_string(state.extents) + "\n";
    return text;
  };
  for (const ParameterSpec& spec : model.parameters()) {
    const std::string want = text_of(one->states(spec));
    for (Optimizer* again : {one.get(), other.get()})
      need(text_of(again->states(spec)) == want, "states of " + spec.name + ", asked again", "others", "the same");
    std::set<std::string> names;
    for (const OptimizerState& state : one->states(spec))
      need(!state.name.empty() && names.insert(state.name).second, "states of " + spec.name,
           "\"" + state.name + "\" without a name of its own", "a name each");
  }
  Made alone = fresh(subject, model), first = fresh(subject, model), second = fresh(subject, model);
  alone.trial->train(0, 3);
  for (std::uint32_t step = 0; step < 3; ++step) {
    second.trial->train(2 * step, 2 * step + 2);
    first.trial->train(step, step + 1);
  }
  const std::string differs = first_difference(first.trial->state(), alone.trial->state());
  need(differs.empty(), differs + " after three steps with another training beside it", "other bits", "those alone");
  for (const PlannedTensor& tensor : second.trial->plan().tensors) {
    if (tensor.owner != TensorOwner::optimizer || size_of(tensor.dtype) < 2) continue;
    for (float value : second.trial->tensor(tensor.kind, tensor.parameter, tensor.layer))
      need(std::isfinite(value), tensor.kind + " of " + tensor_name(tensor) + " after six steps", number(value),
           "finite numbers");
  }
  return "three steps and six";
}

/// Three steps, and kinds of ops, since an option may choose between ops that give the same bits; or the refusal.
std::pair<State, std::string> trained(const Subject& subject, const Model& model, DType master) {
  try {
    Made made = fresh(subject, model, master);
    made.trial->train(0, 3);
    std::string kinds;
    for (const Task& task : made.trial->plan().schedules.tasks) kinds += task.instance.kind + "\n";
    return {made.trial->state(), kinds};
  } catch (const Error& error) {
    return {{}, error.what()};
  }
}

std::string factors(const Subject& subject) {
  for (std::int64_t steps : {1, 2, 3, 7, 100, 10'000, 1'000'000}) {
    auto schedule = subject.make<Schedule>(), other = subject.make<Schedule>();
    std::int64_t stride = std::max<std::int64_t>(1, steps / 9973);
    for (std::int64_t i = 0; i < steps; i += stride) {
      const std::int64_t step = steps - 1 - i;  // backwards: a factor depends on the step alone
      const double factor = schedule->factor(step, steps);
      const std::string where = "factor of step " + std::to_string(step) + " of " + std::to_string(steps);
      need(std::isfinite(factor) && factor >= 0 && factor <= 1, where, number(factor), "from 0 to 1");
      need(other->factor(step, steps) == factor && schedule->factor(step, steps) == factor, where + ", asked again",
           "another number", number(factor));
    }
  }
  return "";
}

}  // namespace

void check_optimizer(Report& report, const Subject& subject) {
  const testkit::TinyModel model;
  report.contract("learns", [&] { return learns(subject, model); });
  report.contract("learning rate", [&] { return keeps_to_rate(subject, model); });
  report.contract("every element", [&] { return changes_all(subject, model); });
  report.contract("gradient scale", [&] { return scales_gradients(subject, model); });
  report.contract("locality", [&] { return local(subject); });
  report.contract("masters in bf16", [&] { return rounds_masters(subject, model); });
  report.contract("two trainings", [&] { return side_by_side(subject, model); });
  report.contract("options", [&] {
    const testkit::TinyModel wide(testkit::TinyModelOptions{.width = 144});  // rows of more than one block of 128
    return options_have_effect(subject, [&](const Subject& changed) {
      return std::pair(trained(changed, wide, DType::f32), trained(changed, wide, DType::bf16));
    });
  });
  report.contract("skips", [&] { return skips(subject, model); });
  report.contract("save and restore", [&] { return optimizer_resumes(subject, model); });
}

void check_schedule(Report& report, const Subject& subject) {
  report.contract("factors", [&] { return factors(subject); });
  report.contract("options", [&] {
    return options_have_effect(subject, [](const Subject& changed) {
      std::vector<double> made;
      auto schedule = changed.make<Schedule>();
      for (std::int64_t steps : {10, 1000, 100'000})
        for (std::int64_t i = 0; i < 100; ++i) made.push_back(schedule->factor(i * steps / 100, steps));
      return made;
    });
  });
}

}  // namespace quern::conformance
