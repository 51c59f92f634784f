#include "conformance/expected/observations.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <set>

#include "base/files/test_directory.h"
#include "conformance/communicator/communicator_group.h"
#include "conformance/contracts.h"
#include "conformance/device/device_ops.h"
#include "conformance/harness/trial.h"
#include "conformance/optimizer/update_run.h"
#include "conformance/precision/product_run.h"
#include "conformance/store/flipped_bit.h"
#include "quern/data_source.h"
#include "quern/testkit/tiny_model.h"

namespace quern::conformance {

namespace {

constexpr std::size_t kFew = 12;  ///< numbers that stand for themselves
constexpr const char* kNoState = "the state of something else, 0123456789 0123456789 0123456789";

std::vector<double> digest(const std::vector<float>& values) {
  if (values.size() <= kFew) return {values.begin(), values.end()};
  const auto direction = testkit::random_normal(static_cast<std::int64_t>(values.size()), 1);
  double squares = 0, along = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    squares += double{values[i]} * values[i];
    along += double{values[i]} * direction[i];
  }
  const double length = std::sqrt(static_cast<double>(values.size()));
  return {std::sqrt(squares) / length, along / length};
}

// ---- models: weights by their exported names, losses, gradients, states ----

std::uint64_t seed_of(const std::string& name) {  // FNV-1a
  std::uint64_t seed = 14695981039346656037u;
  for (const char letter : name) seed = (seed ^ static_cast<unsigned char>(letter)) * 1099511628211u;
  return seed;
}

/// The loss of weights that their exported names decide: which of two tensors of one size stands where.
double loss_by_names(Trial& trial, const Batch& batch) {
  for (const PlannedTensor& tensor : trial.plan().tensors) {
    if (tensor.kind != names::kMaster) continue;
    const ParameterSpec& spec = trial.plan().parameter(tensor.parameter).spec;
    std::vector<float> values;
    for (const ParameterPart& part : spec.parts) {
      const float middle = part.init.kind == Init::Kind::ones ? 1 : 0;
      for (const float one : testkit::random_normal(part.rows * spec.columns(),
                                                    seed_of(part.hf_name + " " + std::to_string(tensor.layer)), 0.1))
        values.push_back(middle + one);
    }
    trial.write(tensor.kind, tensor.parameter, tensor.layer, values);
  }
  return trial.loss(batch);
}

/// "0 in 0, 0 in 1"
std::string overwrites(const OpSpec& spec) {
  std::set<std::pair<int, int>> pairs(spec.may_overwrite.begin(), spec.may_overwrite.end());
  std::string text;
  for (const auto& [output, input] : pairs)
    text += (text.empty() ? "" : ", ") + std::to_string(output) + " in " + std::to_string(input);
  return text.empty() ? "none" : text;
}

Observed of_model(const Subject& subject) {
  auto device = oracle(subject.host);
  auto model = subject.make<Model>();
  const ModelTraits traits = model->traits();
  Observed seen;
  seen["traits"] =
      std::vector<double>{static_cast<double>(traits.layers), static_cast<double>(traits.width),
                          static_cast<double>(traits.vocabulary), static_cast<double>(traits.max_positions)};
  for (const ParameterSpec& spec : model->parameters())
    for (const ParameterPart& part : spec.parts) {
      const double deviation = part.init.kind == Init::Kind::normal ? part.init.deviation
                               : part.init.kind == Init::Kind::ones ? 1
                                                                    : 0;
      seen["rows, columns, initial value, decay of " + part.hf_name] = std::vector<double>{
          static_cast<double>(part.rows), static_cast<double>(spec.columns()), deviation, spec.decay ? 1.0 : 0.0};
    }
  auto trial = [&](const PrecisionBackend* precision) {
    PlanOptions options;
    options.geometry = {3, std::min<std::int64_t>(7, traits.max_positions)};
    auto made = std::make_unique<Trial>(subject.host, TrialParts{*model, *device, precision, nullptr}, options);
    made->stir();
    return made;
  };
  const testkit::PlainPrecision bf16(DType::bf16);
  std::map<std::string, double> kinds;
  const auto narrow = trial(&bf16);
  for (const Task& task : narrow->plan().schedules.tasks)
    for (const auto* operands : {&task.instance.inputs, &task.instance.outputs})
      for (const Operand& operand : *operands)
        if (operand.present) ++kinds[task.instance.kind + " of " + std::string(name_of(operand.dtype))];
  for (const OpSpec& own : subject.host.ops())
    for (const auto& [kind, count] : kinds)
      if (kind.starts_with(own.kind + " of ")) seen["operands in bf16: " + kind] = std::vector<double>{count};
  for (const OpSpec& own : subject.host.ops())
    seen["outputs of " + own.kind + " in memory of inputs"] = overwrites(own);
  const auto plain = trial(nullptr);
  const Batch batch = random_batch(plain->plan(), 3);
  seen["loss"] = std::vector<double>{plain->loss(batch)};
  std::map<std::string, std::vector<double>> gradients;  // by parameter, of one layer after another
  for (const auto& [name, gradient] : plain->gradients(batch))
    for (double one : digest(gradient)) gradients["gradient of " + name.substr(0, name.find('/'))].push_back(one);
  for (const auto& [name, numbers] : gradients) seen[name] = numbers;
  if (!plain->plan().model_states.empty()) {
    plain->train(0, 2);
    seen["after two steps: loss"] = std::vector<double>{plain->loss(batch)};
    for (const PlannedTensor& tensor : plain->plan().tensors)
      if (tensor.owner == TensorOwner::precision)
        seen["after two steps: state " + tensor.kind + tensor_name(tensor)] =
            digest(plain->tensor(tensor.kind, tensor.parameter, tensor.layer));
  }
  seen["loss, weights by their names"] = std::vector<double>{loss_by_names(*plain, batch)};
  return seen;
}

// ---- optimizers: an update of a matrix and of a vector ----

Observed of_optimizer(const Subject& subject) {
  auto device = oracle(subject.host);
  auto optimizer = subject.make<Optimizer>();
  OpSet ops = builtin_ops();
  for (const OpSpec& spec : subject.host.ops()) ops.add(spec);
  Observed seen;
  ParameterSpec slow = matrix("slow", ParameterGroup::block, "slow", 16, 24);
  slow.rate = 0.5;
  for (const ParameterSpec& spec : {matrix("matrix", ParameterGroup::block, "w", 48, 32), slow,
                                    vector("vector", ParameterGroup::head, "v", 96, Init::Kind::ones)}) {
    UpdateRun run(*device, ops, *optimizer, spec);
    run.add(1);
    const std::vector<PoisonedTensor> results = run.run();
    for (std::size_t i = 0; i < results.size(); ++i)
      seen["new " + run.name_of(i + 1) + " of a " + spec.name] = digest(results[i].floats());
  }
  return seen;
}

// ---- precision: results of a linear and of a loss ----

Observed of_precision(const Subject& subject) {
  auto device = oracle(subject.host);
  auto backend = subject.make<PrecisionBackend>();
  Observed seen;
  for (const auto& [what, name] : {std::pair{ProductRun::What::linear, "linear"}, {ProductRun::What::loss, "loss"}}) {
    const ProductSize size{64, 48, 32};
    const DType activation = backend->traits().activation;
    ProductInputs inputs;
    inputs.x = testkit::random_normal(size.tokens * size.in, 1, 1, activation);
    inputs.weight = testkit::random_normal(size.out * size.in, 2, 0.15);
    inputs.bias = testkit::random_normal(size.out, 3, 1, activation);
    inputs.dy = testkit::random_normal(size.tokens * size.out, 4, 1, activation);
    for (std::int64_t i = 0; i < size.tokens; ++i) inputs.targets.push_back(static_cast<std::int32_t>(i % size.out));
    ProductRun run(subject.host, *backend, *device, what, size);
    for (const auto& [result, values] : run.run(inputs)) seen[result + " of a " + name] = digest(values);
    seen[std::string("formats in a ") + name] = run.formats();
  }
  return seen;
}

// ---- schedules: factors ----

Observed of_schedule(const Subject& subject) {
  auto schedule = subject.make<Schedule>();
  Observed seen;
  for (std::int64_t steps : {10, 1000}) {
    std::vector<double> factors;
    for (std::int64_t i = 0; i < 10; ++i) factors.push_back(schedule->factor(i * i * steps / 100, steps));
    factors.push_back(schedule->factor(steps - 1, steps));
    seen["factors at steps 0, 1/100, 4/100, 9/100, ... 81/100 and the last of " + std::to_string(steps)] = factors;
  }
  return seen;
}

// ---- data: the first batches, and where the next epoch begins ----

/// Elements of four bytes as real numbers where they all may be some, else bytes.
std::vector<float> elements(const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  const bool real = bytes.size() % sizeof(float) == 0 && std::all_of(values.begin(), values.end(), [](float value) {
                      return value == 0 || (std::fabs(value) > 1e-20f && std::fabs(value) < 1e20f);
                    });
  if (real) return values;
  values.clear();
  for (std::byte byte : bytes) values.push_back(static_cast<float>(std::to_integer<int>(byte)));
  return values;
}

/// The error's text; empty: there is none.
std::string refusal_of(const std::function<void()>& action) {
  try {
    action();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

Observed of_dataset(const Subject& subject) {
  auto dataset = subject.make<Dataset>();
  Observed seen;
  for (const auto& [split, name] : {std::pair{Split::train, "train: "}, {Split::validation, "validation: "}}) {
    if (!dataset->has(split)) continue;
    DataRequest request{.split = split, .geometry = {3, 16}, .seed = 5};
    auto source = dataset->open(request);
    seen[std::string(name) + "a saved state that is none"] = refusal_of([&] { source->load_state(kNoState); });
    const std::int64_t epoch = source->epoch_tokens(), rows = request.geometry.batch;
    seen[std::string(name) + "vocabulary, tokens of an epoch"] =
        std::vector<double>{static_cast<double>(source->vocabulary()), static_cast<double>(epoch)};
    const std::int64_t over = epoch / request.geometry.sequence / rows;  // the batch in which an epoch ends
    Batch batch;
    for (std::int64_t number = 0; number <= std::min<std::int64_t>(over, 10'000); ++number) {
      source->next(batch);
      if (number > 1 && number != over) continue;
      const std::string of = std::string(name) + "batch " + std::to_string(number) + ": ";
      auto put = [&](const std::string& what, const std::vector<std::int32_t>& values) {
        if (!values.empty()) seen[of + what] = digest({values.begin(), values.end()});
      };
      put("tokens", batch.tokens);
      put("targets", batch.targets);
      put("positions", batch.positions);
      for (const auto& [input, bytes] : batch.inputs) seen[of + input] = digest(elements(bytes));
      std::string rows_text;
      for (const std::string& row : batch.names) rows_text += (rows_text.empty() ? "" : "; ") + row;
      if (!rows_text.empty()) seen[of + "rows"] = rows_text;
    }
  }
  return seen;
}

// ---- log sinks: their files ----

Observed of_log(const Subject& subject) {
  Observed seen;
  for (const auto& [file, text] : written_log(subject)) seen["file " + file] = text;
  return seen;
}

// ---- devices: ops of the vocabulary that they do not take ----

Observed of_device(const Subject& subject) {
  Observed seen;
  std::string kinds;
  const auto device = subject.make<Device>();
  for (const auto& [kind, reason] : refused_ops(*device)) {
    kinds += (kinds.empty() ? "" : ", ") + kind;
    seen["why it refuses " + kind] = reason;
  }
  seen["ops with a case that it refuses"] = kinds;
  return seen;
}

// ---- stores: their limit, and whether they notice a bit that flips ----

Observed of_store(const Subject& subject) {
  constexpr std::size_t kSlot = std::size_t{512} << 10, kMost = 5;
  Observed seen;
  auto device = open_device(subject.host, subject.options);
  const TestDirectory folder;
  auto store = subject.make<OffloadStore>();
  store->open(*device, {.folder = folder.path()});
  double slots = 0;
  try {
    for (; slots < kMost; ++slots) store->reserve(kSlot);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resources) throw;
  }
  seen["slots of 512 KiB, of five"] = std::vector<double>{slots};
  const OffloadTraits& traits = store->traits();
  seen["mappable, in host memory, can be captured"] =
      std::vector<double>{static_cast<double>(traits.mappable), static_cast<double>(traits.in_host_memory),
                          static_cast<double>(traits.can_capture)};
  seen["capacity, rates of puts and gets: 0 if not stated"] =
      std::vector<double>{static_cast<double>(traits.capacity > 0), static_cast<double>(traits.put_rate > 0),
                          static_cast<double>(traits.get_rate > 0)};
  seen["a bit of stored data flips"] = std::string(name_of(after_flipped_bit(subject)));
  return seen;
}

// ---- communicators: when a group of one rank has a fault ----

Observed of_communicator(const Subject& subject) {
  constexpr int kSums = 8;
  const TestDirectory scratch;
  const auto outcomes = run_all_ranks(1, 60, [&](int rank) {
    Joined group(subject, scratch.path(), rank, 1);
    const Registered block(group, 4096);
    const CommunicatorTraits& traits = group.communicator->traits();
    std::string text = std::string(traits.can_capture ? "can" : "cannot") + " be captured, sums " +
                       (traits.sums_in_rank_order ? "in rank order" : "in another order") +
                       (traits.needs_watchdog ? ", needs a watchdog" : "") +
                       (traits.launcher.empty() ? "" : ", started by " + traits.launcher);
    for (int sum = 0; sum <= kSums; ++sum) {
      if (const auto fault = group.communicator->error())
        return text + "; " + *fault + " after " + std::to_string(sum) + " sums";
      group.communicator->all_reduce({block.memory.data(), DType::f32, {1024}}, Reduction::sum, group.stream);
      group.device->synchronize(group.stream);
    }
    return text + "; no fault after " + std::to_string(kSums) + " sums";
  });
  return {{"one rank", outcomes[0].text}};
}

}  // namespace

Observer observer_of(const std::string& kind) {
  const std::pair<const char*, Observer> observers[] = {
      {kPluginKind<Model>, {of_model, 1e-4}},           {kPluginKind<Optimizer>, {of_optimizer, 1e-5}},
      {kPluginKind<Schedule>, {of_schedule, 1e-6}},     {kPluginKind<PrecisionBackend>, {of_precision, 1e-2}},
      {kPluginKind<Dataset>, {of_dataset, 1e-5}},       {kPluginKind<LogSink>, {of_log, 0}},
      {kPluginKind<OffloadStore>, {of_store, 0}},       {kPluginKind<Device>, {of_device, 0}},
      {kPluginKind<Communicator>, {of_communicator, 0}}};
  for (const auto& [known, observer] : observers)
    if (kind == known) return observer;
  return {};
}

}  // namespace quern::conformance
