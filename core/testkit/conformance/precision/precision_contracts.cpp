// Of precision backends: each matmul alone against the exact one, in every form that the options offer, then small
// models: gradients near fp32's, and trainings that repeat, recompute and resume bit for bit. All on the oracle.
#include <algorithm>
#include <cmath>
#include <limits>

#include "conformance/contracts.h"
#include "conformance/harness/trial.h"
#include "conformance/precision/product_run.h"
#include "quern/numeric.h"
#include "quern/testkit/independence.h"
#include "quern/testkit/tiny_model.h"

namespace quern::conformance {

namespace {

using What = ProductRun::What;
using Pass = ProductRun::Pass;

/// A backend made with one option changed; label empty: as given.
struct Form {
  std::string label;
  std::unique_ptr<PrecisionBackend> backend;
};

/// As given, and with every other choice of a text, the other value of a boolean and a list less each of its texts, one
/// at a time. A value that is refused for how it goes with the others makes no form.
std::vector<Form> forms(const Subject& subject) {
  std::vector<Form> all;
  all.push_back({"", subject.make<PrecisionBackend>()});
  for (const OptionSpec& spec : subject.factory.options) {
    std::vector<OptionValue> values(spec.choices.begin(), spec.choices.end());
    if (spec.type == OptionType::boolean) values = {OptionValue(false), OptionValue(true)};
    const OptionValue* given = subject.values.find(spec.key);
    const auto* texts = given ? std::get_if<std::vector<std::string>>(given) : nullptr;
    for (std::size_t i = 0; texts && i < texts->size(); ++i) {
      std::vector<std::string> fewer = *texts;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
      values.emplace_back(std::move(fewer));
    }
    for (const OptionValue& value : values) {
      if (given && *given == value) continue;
      try {
        all.push_back(
            {" with " + spec.key + " = " + to_string(value), subject.make_with<PrecisionBackend>(spec.key, value)});
      } catch (const Error& error) {
        if (error.code() == ErrorCode::internal) throw;
      }
    }
  }
  return all;
}

ProductInputs random_inputs(What what, const ProductSize& size, DType activation, double scale = 1) {
  auto normal = [&](std::int64_t count, std::uint64_t seed, double deviation, DType dtype) {
    return testkit::random_normal(count, seed, deviation, dtype);
  };
  ProductInputs inputs;
  inputs.x = normal(size.tokens * size.in, 1, scale, activation);
  inputs.weight = normal(size.out * size.in, 2, 1 / std::sqrt(static_cast<double>(size.in)), DType::f32);
  inputs.bias = normal(size.out, 3, scale, activation);
  if (what == What::linear) inputs.dy = normal(size.tokens * size.out, 4, scale, activation);
  for (std::int64_t i = 0; i < size.tokens; ++i)
    inputs.targets.push_back(i % 7 == 3 ? -1 : static_cast<std::int32_t>(i * 5 % size.out));
  return inputs;
}

/// The largest error as a part of its bound.
struct Worst {
  double part = 0, error = 0;
};

double root_mean_square(const std::vector<float>& values) {
  double sum = 0;
  for (float value : values) sum += double{value} * value;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

/// Of few values the errors do not average out: `room` times the bound.
void compare(ProductRun& run, const ProductResults& got, const ProductResults& want, const std::string& where,
             Worst& worst, double room = 1) {
  for (const auto& [name, values] : want) {
    if (run.evaluates() && !got.contains(name)) continue;
    const double error = testkit::relative_error(got.at(name), values), bound = room * run.error_bound(name);
    need(error <= bound, "relative error of " + name + where, number(error),
         "at most " + number(bound) + " for " + run.formats());
    if (error / bound > worst.part) worst = {error / bound, error};
    // A few elements that are all wrong hardly show in a norm. The largest of some thousand errors is about four
    // deviations; elements that are larger than others err more.
    const double most = 8 * bound * root_mean_square(values);
    if (std::string differs = testkit::mismatch(got.at(name), values, 0, most); !differs.empty())
      broken("elements of " + name + where, differs, "each within " + number(most) + " for " + run.formats());
  }
}

/// One matmul in a training and in an evaluation.
void compare_passes(const Subject& subject, const PrecisionBackend& backend, Device& device, What what,
                    const ProductSize& size, const std::string& where, Worst& worst, double room = 1) {
  const ProductInputs inputs = random_inputs(what, size, backend.traits().activation);
  const ProductResults want = exact_product(what, size, inputs);
  for (auto [pass, name] : {std::pair{Pass::training, ""}, {Pass::evaluation, ", evaluated"}}) {
    ProductRun run(subject.host, backend, device, what, size, pass);
    compare(run, run.run(inputs), want, where + name, worst, room);
  }
}

std::string where_of(const Form& form, What what, const ProductSize& size) {
  return std::string(what == What::loss ? " of the loss " : " of a linear ") +
         to_string(Extents{size.tokens, size.in, size.out}) + form.label;
}

constexpr ProductSize kEven{64, 48, 32}, kLossSize{48, 32, 80};
constexpr ProductSize kOfModel{64, 32, 48};  // small_model's

std::string products(const Subject& subject, Device& device, What what) {
  Worst worst;
  std::vector<Form> all = forms(subject);
  std::string formats;
  for (const Form& form : all) {
    const ProductSize size = what == What::loss ? kLossSize : kEven;
    compare_passes(subject, *form.backend, device, what, size, where_of(form, what, size), worst);
    if (formats.empty()) formats = ProductRun(subject.host, *form.backend, device, what, size).formats();
  }
  return formats + ", " + std::to_string(all.size()) + (all.size() == 1 ? " form" : " forms") + ", worst error " +
         number(worst.error) + ", " + number(100 * worst.part) + " % of its bound";
}

/// Sizes that no tile divides work, or are refused with a reason.
std::string odd_sizes(const Subject& subject, Device& device) {
  int worked = 0, refused = 0;
  std::string reason;
  Worst worst;
  for (const Form& form : forms(subject)) {
    for (ProductSize size : {ProductSize{7, 24, 40}, ProductSize{5, 3, 9, false}, ProductSize{1, 2, 2}}) {
      for (What what : {What::linear, What::loss}) {
        const std::string where = where_of(form, what, size);
        try {
          for (Pass pass : {Pass::training, Pass::evaluation})
            ProductRun(subject.host, *form.backend, device, what, size, pass);
        } catch (const Error& error) {
          need(error.code() != ErrorCode::internal, "the refusal" + where, error.what(), "a reason, not a fault");
          ++refused;
          if (reason.empty()) reason = error.what();
          continue;
        }
        compare_passes(subject, *form.backend, device, what, size, where, worst, 3);
        ++worked;
      }
    }
  }
  return std::to_string(worked) + " work, " + std::to_string(refused) + " refused" +
         (reason.empty() ? "" : " (" + reason + ")");
}

/// Values far larger or smaller than one, from the first launch on, and 64 times larger than any before.
std::string magnitudes(const Subject& subject, Device& device) {
  Worst worst;
  for (const Form& form : forms(subject)) {
    const DType activation = form.backend->traits().activation;
    for (double scale : {0x1p-30, 0x1p-10, 0x1p10, 0x1p30}) {
      ProductRun run(subject.host, *form.backend, device, What::linear, kEven);
      for (double grown : {scale, 64 * scale}) {
        const ProductInputs inputs = random_inputs(What::linear, kEven, activation, grown);
        compare(run, run.run(inputs), exact_product(What::linear, kEven, inputs),
                where_of(form, What::linear, kEven) + ", values of about " + number(grown), worst);
        run.advance_states();
      }
    }
  }
  return "2^-30 to 2^36, worst error " + number(worst.error);
}

std::string zeros(const Subject& subject, Device& device) {
  for (const Form& form : forms(subject)) {
    ProductRun run(subject.host, *form.backend, device, What::linear, kEven);
    ProductInputs inputs = random_inputs(What::linear, kEven, form.backend->traits().activation);
    std::fill(inputs.x.begin(), inputs.x.end(), 0.0f);
    std::fill(inputs.dy.begin(), inputs.dy.end(), 0.0f);
    for (int launch : {0, 1}) {
      const ProductResults want = exact_product(What::linear, kEven, inputs), got = run.run(inputs);
      for (const auto& [name, values] : want)
        if (std::string differs = testkit::mismatch(got.at(name), values, 0); !differs.empty())
          broken(name + " of zeros" + where_of(form, What::linear, kEven) + ", launch " + std::to_string(launch),
                 differs, "zeros, and the bias");
      run.advance_states();
    }
  }
  return "";
}

bool all_finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
}

/// An infinity or NaN must not vanish in a conversion: whoever waits for a loss that is not finite would wait in vain.
std::string infinities(const Subject& subject, Device& device) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Form& form : forms(subject)) {
    const std::string where = where_of(form, What::linear, kEven);
    for (float value : {infinity, -infinity, std::nanf("")}) {
      for (bool in_x : {true, false}) {
        ProductRun run(subject.host, *form.backend, device, What::linear, kEven);
        ProductInputs inputs = random_inputs(What::linear, kEven, form.backend->traits().activation);
        run.run(inputs);  // so that delayed scales are known
        (in_x ? inputs.x : inputs.dy)[77] = value;
        const ProductResults got = run.run(inputs);
        for (const char* name : {in_x ? "y" : "dx", "dweight"})
          need(!all_finite(got.at(name)),
               std::string(name) + where + " with " + number(value) + " in " + (in_x ? "x" : "dy"),
               "finite numbers only", "one that is not finite");
      }
    }
  }
  return "";
}

/// Numbers below the least normal one become small ones or zero, no NaN.
std::string denormals(const Subject& subject, Device& device) {
  for (const Form& form : forms(subject)) {
    ProductRun run(subject.host, *form.backend, device, What::linear, {64, 48, 32, false});
    const ProductInputs inputs = random_inputs(What::linear, kEven, form.backend->traits().activation, 1e-40);
    for (const auto& [name, values] : run.run(inputs))
      for (float value : values)
        need(std::isfinite(value) && std::fabs(value) < 1e-35f,
             name + where_of(form, What::linear, kEven) + " of values near 1e-40", number(value), "below 1e-35");
  }
  return "";
}

/// Rounding to int8 is to the nearest integer, or up as often as the number asks for, with a draw for each element.
std::string rounding(const Subject& subject, Device& device) {
  constexpr ProductSize kLarge{256, 192, 160};
  std::size_t nearest = 0, chance = 0;
  for (const Form& form : forms(subject)) {
    ProductRun run(subject.host, *form.backend, device, What::linear, kLarge);
    run.run(random_inputs(What::linear, kLarge, form.backend->traits().activation));
    for (const ProductRun::Quantization& made : run.quantizations()) {
      const std::string what = made.label + form.label;
      std::vector<double> draws;
      bool is_nearest = true;
      for (std::size_t i = 0; i < made.codes.size(); ++i) {
        const double exact = made.exact[i], code = made.codes[i], below = std::floor(exact), up = exact - below;
        // The quotient's own rounding in fp32 may pass an integer, or a half.
        need(code > exact - 1 - 1e-4 && code < exact + 1 + 1e-4, "element " + std::to_string(i) + " of " + what,
             number(code), "an integer beside " + number(exact));
        need(std::fabs(code) <= made.largest, "element " + std::to_string(i) + " of " + what, number(code),
             "at most " + number(made.largest) + " in magnitude, the largest of its format");
        is_nearest = is_nearest && std::fabs(code - exact) <= 0.5 + 1e-4;
        if (up > 0.1 && up < 0.9) draws.push_back(((code > exact ? 1 : 0) - up) / std::sqrt(up * (1 - up)));
      }
      ++(is_nearest ? nearest : chance);
      if (is_nearest) continue;
      const std::string found = testkit::dependence(draws);
      need(found.empty(), "roundings in " + what, found,
           "up as often as the number asks for, with a draw for each element");
    }
  }
  return std::to_string(nearest) + " quantizations to the nearest integer, " + std::to_string(chance) + " by chance";
}

testkit::TinyModelOptions small_model() {
  return {
      .layers = 2, .width = 32, .vocabulary = 80, .heads = 4, .kv_heads = 2, .head_dim = 8, .ffn = 48, .bias = true};
}

struct Made {
  std::unique_ptr<Device> device;
  std::unique_ptr<PrecisionBackend> backend;
  std::unique_ptr<Trial> trial;
};

Made fresh(const Subject& subject, const Model& model, const std::vector<std::string>& recompute = {},
           bool plain = false) {
  Made made{oracle(subject.host), subject.make<PrecisionBackend>(), nullptr};
  PlanOptions options;
  options.geometry = {4, 16};
  options.recompute = recompute;
  made.trial = std::make_unique<Trial>(
      subject.host, TrialParts{model, *made.device, plain ? nullptr : made.backend.get(), nullptr}, options);
  return made;
}

/// Of two zeros 1, of one 0.
double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double product = 0;
  for (std::size_t i = 0; i < a.size(); ++i) product += double{a[i]} * b[i];
  const double lengths = root_mean_square(a) * root_mean_square(b) * static_cast<double>(a.size());
  if (lengths == 0) return a == b ? 1 : 0;
  return product / lengths;
}

std::string whole_model(const Subject& subject, const Model& model) {
  Made got = fresh(subject, model), want = fresh(subject, model, {}, true);
  const Batch batch = random_batch({4, 16}, model.traits().vocabulary, 3);
  ProductRun run(subject.host, *got.backend, *got.device, What::linear, kOfModel);
  const double product = std::max({run.error_bound("y"), run.error_bound("dx"), run.error_bound("dweight")});
  const Tensors gradients = got.trial->gradients(batch), exact = want.trial->gradients(batch);
  // Seventeen matmuls are between a loss and the first layer's gradients, each of which errs on its own; gradients of
  // norms and biases are differences of large sums, which multiplies their relative error by a few.
  // Fewer than 8 bits may err as much as twice the gradient's length; its direction is right on average,
  // and none is turned round.
  const double errs = 3 * product * std::sqrt(17.0), bound = std::min(run.is_narrow() ? 2.0 : 0.9, errs);
  double worst = 0, cosines = 0;
  std::string worst_name;
  for (const auto& [name, values] : exact) {
    const double error = testkit::relative_error(gradients.at(name), values);
    need(error <= bound, "relative error of the gradient of " + name, number(error), "at most " + number(bound));
    const double direction = cosine(gradients.at(name), values);
    need(direction > -0.2, "cosine of the gradient of " + name, number(direction),
         "above -0.2");  // ternary norms: -0.04
    cosines += direction / static_cast<double>(exact.size());
    if (error >= worst) worst = error, worst_name = name;
  }
  const double least = 0.5 / std::sqrt(1 + errs * errs);
  need(cosines >= least, "mean cosine of gradients", number(cosines), "at least " + number(least));
  // Biases start as zeros, and an evaluation that leaves them out would not show.
  for (Made* made : {&got, &want}) made->trial->stir(".bias");
  const double loss = got.trial->loss(batch), exact_loss = want.trial->loss(batch);
  need(std::fabs(loss - exact_loss) <= product * exact_loss, "loss", number(loss),
       number(exact_loss) + " within " + number(100 * product) + " %");
  return "worst gradient error " + number(worst) + " (" + worst_name + "), bound " + number(bound) + "; loss " +
         number(loss) + ", fp32 " + number(exact_loss);
}

/// The loss or the gradient norm of a model with an infinity in a weight is not finite, and no update is applied.
std::string guards(const Subject& subject, const Model& model) {
  for (const char* parameter : {"up.weight", "final_norm.weight"}) {
    Made made = fresh(subject, model);
    const int layer = std::string(parameter) == "up.weight" ? 0 : -1;
    std::vector<float> values = made.trial->tensor("master", parameter, layer);
    values[5] = std::numeric_limits<float>::infinity();
    made.trial->write("master", parameter, layer, values);
    made.trial->train(0, 1);
    Engine::StepResult result = made.trial->engine().result();
    need(result.update.apply == 0, std::string("the update after an infinity in ") + parameter, "applied",
         "skipped, for the loss or gradient is not finite");
  }
  return "";
}

std::string repeats(const Subject& subject, const Model& model) {
  Made one = fresh(subject, model), two = fresh(subject, model), less = fresh(subject, model, {"block"});
  Made evaluating = fresh(subject, model);
  const Batch other = random_batch({4, 16}, model.traits().vocabulary, 77);
  const double want = one.trial->train(0, 3);
  const State state = one.trial->state();
  for (std::uint32_t step = 0; step < 3; ++step) {
    evaluating.trial->train(step, step + 1);
    evaluating.trial->loss(other);
  }
  two.trial->train(0, 3);
  less.trial->train(0, 3);
  for (auto& [made, how] : {std::pair{&two, "a second run"},
                            {&less, "recomputing the block"},
                            {&evaluating, "evaluations between steps"}}) {
    const std::string difference = first_difference(made->trial->state(), state);
    need(difference.empty(), difference + " after three steps with " + how, "other bits", "the same");
  }
  return "loss " + number(want) + " after 3 steps; a second run, recomputation and evaluations change no bit";
}

std::string precision_resumes(const Subject& subject, const Model& model) {
  std::vector<Made> made;
  made.reserve(4);
  return resumes([&] {
    made.push_back(fresh(subject, model));
    return std::move(made.back().trial);
  });
}

}  // namespace

void check_precision(Report& report, const Subject& subject) {
  const testkit::TinyModel model(small_model());
  std::unique_ptr<Device> device = oracle(subject.host);
  report.contract("linear", [&] { return products(subject, *device, What::linear); });
  report.contract("loss", [&] { return products(subject, *device, What::loss); });
  report.contract("odd sizes", [&] { return odd_sizes(subject, *device); });
  report.contract("magnitudes", [&] { return magnitudes(subject, *device); });
  report.contract("zeros", [&] { return zeros(subject, *device); });
  report.contract("infinities", [&] { return infinities(subject, *device); });
  report.contract("denormals", [&] { return denormals(subject, *device); });
  report.contract("rounding", [&] { return rounding(subject, *device); });
  report.contract("gradients", [&] { return whole_model(subject, model); });
  report.contract("guard", [&] { return guards(subject, model); });
  report.contract("determinism", [&] { return repeats(subject, model); });
  report.contract("save and restore", [&] { return precision_resumes(subject, model); });
}

}  // namespace quern::conformance
