// Optimizers against their papers' formulas in double precision: a model trains for 20 steps, each formula is given the
// gradients of the steps, and masters are compared at the end.
#include <algorithm>
#include <cmath>
#include <functional>

#include <doctest/doctest.h>

#include "optimizer/averaged_steps.h"
#include "run/options/run_schemas.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;

namespace {

using Values = std::vector<double>;
using Settings = std::vector<std::pair<std::string, OptionValue>>;

constexpr int kSteps = 20;

double rate_of(int step) { return 0.01 * (1 - step / 40.0); }

/// A parameter of one layer under a formula.
struct Reference {
  const ParameterSpec* spec = nullptr;
  Values master, first, second;
  Values iterate = {};  ///< of schedule-free AdamW, whose average is `first`
};
/// Step `step` (from 0) at a rate.
using Formula = std::function<void(Reference& r, const Values& gradient, int step, double rate)>;

std::unique_ptr<Optimizer> made(const std::string& id, const Settings& settings) {
  static PluginHost host = run_host();
  OptionValues values = default_values(host.require("optimizer", id).options);
  for (const auto& [key, value] : settings) values.set(key, value);
  return host.create<Optimizer>(id, values);
}

struct Outcome {
  double error = 0;     ///< largest of an element, of the largest magnitude in its tensor
  double distance = 0;  ///< norm of all errors, of the norm of all changes
};

Plan plan_for(const testkit::TinyModel& model, const Optimizer& optimizer, const Device& device) {
  static const testkit::PlainPrecision precision;
  static const std::vector<OpSpec> custom;
  PlanOptions options;
  options.geometry = {4, 8};
  options.uploads = 4;
  return make_plan({model, precision, device, optimizer, custom}, options);
}

Outcome compare(const std::string& id, const Settings& settings, const Formula& formula) {
  const testkit::TinyModel model;
  const auto optimizer = made(id, settings);
  const auto device = cpu_device();
  conformance::Trial trial(plugin_host(), plan_for(model, *optimizer, *device), *device);
  std::map<std::string, Reference> references;
  const std::vector<ParameterSpec> specs = model.parameters();
  const conformance::Tensors start = trial.all("master");
  for (const auto& [name, values] : start) {
    Reference& r = references[name];
    r.spec = &*std::find_if(specs.begin(), specs.end(),
                            [&](const ParameterSpec& spec) { return spec.name == name.substr(0, name.find('/')); });
    r.master.assign(values.begin(), values.end());
    r.first.assign(values.size(), 0), r.second.assign(values.size(), 0);
  }
  AveragedSteps averaged;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = random_batch({4, 8}, 37, static_cast<std::uint64_t>(step));
    const auto valid =
        std::count_if(batch.targets.begin(), batch.targets.end(), [](int target) { return target >= 0; });
    const auto number = static_cast<std::uint32_t>(step);
    const auto rate = static_cast<float>(rate_of(step));
    StepState state{.step = number, .seed_low = 3, .learning_rate = rate, .updates = number};
    state.average = static_cast<float>(averaged.share(rate_of(step)));
    averaged.add(rate_of(step));
    trial.engine().micro_step(batch, state);
    for (const auto& [name, sums] : trial.all("gradient")) {
      Values gradient;
      for (float sum : sums) gradient.push_back(double{sum} / static_cast<double>(valid));
      formula(references.at(name), gradient, step, rate);
    }
    trial.engine().update();
    trial.engine().result();
  }
  Outcome outcome;
  double errors = 0, changes = 0;
  for (const auto& [name, got] : trial.all("master")) {
    const Reference& r = references.at(name);
    double error = 0, change = 0, magnitude = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      error = std::max(error, std::fabs(got[i] - r.master[i]));
      magnitude = std::max(magnitude, std::fabs(r.master[i]));
      change = std::max(change, std::fabs(r.master[i] - start.at(name)[i]));
      errors += std::pow(got[i] - r.master[i], 2), changes += std::pow(r.master[i] - start.at(name)[i], 2);
    }
    REQUIRE(change > 0);
    outcome.error = std::max(outcome.error, error / magnitude);
  }
  for (const auto& [name, got] : trial.all("average")) {
    const Values& want = references.at(name).first;
    const double magnitude = std::fabs(
        *std::max_element(want.begin(), want.end(), [](double a, double b) { return std::fabs(a) < std::fabs(b); }));
    for (std::size_t i = 0; i < got.size(); ++i)
      outcome.error = std::max(outcome.error, std::fabs(got[i] - want[i]) / magnitude);
  }
  outcome.distance = std::sqrt(errors / changes);
  MESSAGE(id << ": largest error " << outcome.error << ", distance " << outcome.distance);
  return outcome;
}

// ---- formulas ----

void adamw(Reference& r, const Values& gradient, int step, double rate) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const double g = gradient[i];
    r.first[i] = 0.9 * r.first[i] + 0.1 * g;
    r.second[i] = 0.95 * r.second[i] + 0.05 * g * g;
    const double m = r.first[i] / (1 - std::pow(0.9, step + 1)), v = r.second[i] / (1 - std::pow(0.95, step + 1));
    r.master[i] = r.master[i] * (1 - rate * (r.spec->decay ? 0.1 : 0)) - rate * m / (std::sqrt(v) + 1e-8);
  }
}

/// Of iterates; masters are between them and their average, weighted by the largest rates so far squared.
void schedule_free(Reference& r, const Values& gradient, int step, double rate) {
  Values& z = r.iterate;
  if (step == 0) z = r.first = r.master;
  double weights = 0, largest = 0;
  for (int i = 0; i <= step; ++i) {
    largest = std::max(largest, rate_of(i));
    weights += largest * largest;
  }
  const double share = largest * largest / weights;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    r.second[i] = 0.95 * r.second[i] + 0.05 * gradient[i] * gradient[i];
    const double v = r.second[i] / (1 - std::pow(0.95, step + 1));
    z[i] -= rate * (gradient[i] / (std::sqrt(v) + 1e-8) + (r.spec->decay ? 0.1 : 0) * r.master[i]);
    r.first[i] = (1 - share) * r.first[i] + share * z[i];
    r.master[i] = 0.1 * z[i] + 0.9 * r.first[i];
  }
}

Formula sgd(double momentum, bool nesterov, double decay) {
  return [=](Reference& r, const Values& gradient, int, double rate) {
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const double g = gradient[i] + (r.spec->decay ? decay : 0) * r.master[i];
      r.first[i] = momentum * r.first[i] + g;
      r.master[i] -= rate * (nesterov ? g + momentum * r.first[i] : r.first[i]);
    }
  };
}

void lion(Reference& r, const Values& gradient, int, double rate) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const double direction = 0.9 * r.first[i] + 0.1 * gradient[i];
    r.master[i] *= 1 - rate * (r.spec->decay ? 0.5 : 0);
    r.master[i] -= rate * ((direction > 0) - (direction < 0));
    r.first[i] = 0.99 * r.first[i] + 0.01 * gradient[i];
  }
}

struct Matrix {
  std::size_t rows, columns;
  Values at;
  double& operator()(std::size_t i, std::size_t j) { return at[i * columns + j]; }
  double operator()(std::size_t i, std::size_t j) const { return at[i * columns + j]; }
};

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix y{a.rows, b.columns, Values(a.rows * b.columns)};
  for (std::size_t i = 0; i < a.rows; ++i)
    for (std::size_t k = 0; k < a.columns; ++k)
      for (std::size_t j = 0; j < b.columns; ++j) y(i, j) += a(i, k) * b(k, j);
  return y;
}

Matrix transposed(const Matrix& a) {
  Matrix y{a.columns, a.rows, Values(a.at.size())};
  for (std::size_t i = 0; i < a.rows; ++i)
    for (std::size_t j = 0; j < a.columns; ++j) y(j, i) = a(i, j);
  return y;
}

/// As published: of a tall matrix's transpose.
Matrix newton_schulz(Matrix x) {
  if (x.rows > x.columns) return transposed(newton_schulz(transposed(x)));
  double norm = 0;
  for (double value : x.at) norm += value * value;
  norm = std::max(std::sqrt(norm), 1e-7);
  for (double& value : x.at) value /= norm;
  for (int i = 0; i < 5; ++i) {
    const Matrix gram = product(x, transposed(x)), squared = product(gram, gram);
    Matrix factor = gram;
    for (std::size_t k = 0; k < gram.at.size(); ++k) factor.at[k] = -4.7750 * gram.at[k] + 2.0315 * squared.at[k];
    const Matrix more = product(factor, x);
    for (std::size_t k = 0; k < x.at.size(); ++k) x.at[k] = 3.4445 * x.at[k] + more.at[k];
  }
  return x;
}

/// Li et al., "NorMuon" (2025), and its published code: rows over the root of their average square, the whole as long
/// as before.
void normalize_rows(Matrix& x, double* average) {
  double before = 0, after = 0;
  for (std::size_t i = 0; i < x.rows; ++i) {
    double square = 0;
    for (std::size_t k = 0; k < x.columns; ++k) square += x(i, k) * x(i, k);
    average[i] = 0.95 * average[i] + 0.05 * square / static_cast<double>(x.columns);
    for (std::size_t k = 0; k < x.columns; ++k) x(i, k) /= std::sqrt(average[i]) + 1e-10;
    before += square;
    for (std::size_t k = 0; k < x.columns; ++k) after += x(i, k) * x(i, k);
  }
  for (double& value : x.at) value *= std::sqrt(before / after);
}

/// The matrices of a packed one that take steps of their own, by rows.
std::vector<std::size_t> matrices(const ParameterSpec& spec, const std::string& split) {
  std::vector<std::size_t> rows;
  for (const ParameterPart& part : spec.parts) {
    if (split == "tensors" || part.heads.empty()) rows.push_back(static_cast<std::size_t>(part.rows));
    if (split == "tensors") continue;
    for (const HeadRows& run : part.heads)
      for (std::int64_t head = 0; head < run.heads; ++head)
        if (split == "heads" || head % run.group == 0)
          rows.push_back(static_cast<std::size_t>(run.rows));
        else
          rows.back() += static_cast<std::size_t>(run.rows);
  }
  return rows;
}

Formula muon(bool original, bool by_rows = false, const std::string& split = "tensors") {
  return [=](Reference& r, const Values& gradient, int step, double rate) {
    if (r.spec->group != ParameterGroup::block || r.spec->extents.size() < 2) return adamw(r, gradient, step, rate);
    const auto columns = static_cast<std::size_t>(r.spec->extents[1]);
    std::size_t begin = 0;
    for (const std::size_t rows : matrices(*r.spec, split)) {
      Matrix direction{rows, columns, Values(rows * columns)};
      for (std::size_t k = 0; k < rows * columns; ++k) {
        double& average = r.first[begin + k];
        average = 0.95 * average + 0.05 * gradient[begin + k];
        direction.at[k] = 0.95 * average + 0.05 * gradient[begin + k];
      }
      Matrix step_along = newton_schulz(direction);
      if (by_rows) normalize_rows(step_along, r.second.data() + begin / columns);
      const double tall = static_cast<double>(rows) / static_cast<double>(columns);
      const double size =
          original ? std::sqrt(std::max(1.0, tall)) : 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns)));
      for (std::size_t k = 0; k < rows * columns; ++k)
        r.master[begin + k] = r.master[begin + k] * (1 - rate * 0.1) - rate * size * step_along.at[k];
      begin += rows * columns;
    }
  };
}

}  // namespace

TEST_CASE("AdamW, SGD and Lion follow their formulas in fp32") {
  CHECK(compare("adamw", {}, adamw).error < 1e-6);
  CHECK(compare("sgd", {}, sgd(0.9, false, 0)).error < 1e-6);
  CHECK(compare("sgd", {{"nesterov", true}, {"weight_decay", 0.1}, {"momentum", 0.8}}, sgd(0.8, true, 0.1)).error <
        1e-6);
  CHECK(compare("lion", {}, lion).error < 1e-6);
}

TEST_CASE("schedule-free AdamW follows its formula and its average too") {
  CHECK(compare("schedule_free", {}, schedule_free).error < 1e-6);
}

TEST_CASE("Muon follows its formula, for each tensor of a packed matrix") {
  const OptionValue fp32(std::string("fp32")), original(std::string("original"));
  CHECK(compare("muon", {{"matmuls", fp32}}, muon(false)).error < 1e-6);
  CHECK(compare("muon", {{"matmuls", fp32}, {"step_size", original}}, muon(true)).error < 1e-6);
  CHECK(compare("muon", {}, muon(false)).distance < 0.01);
  const OptionValue rows(std::string("rows"));
  CHECK(compare("muon", {{"matmuls", fp32}, {"normalize", rows}}, muon(false, true)).error < 1e-6);
  CHECK(compare("muon", {{"normalize", rows}}, muon(false, true)).distance < 0.01);
}

TEST_CASE("Muon follows its formula for each head and for heads that share keys and values") {
  for (const std::string split : {"heads", "head_groups"}) {
    CAPTURE(split);
    const testkit::TinyModel model;
    const std::vector<ParameterSpec> specs = model.parameters();
    const auto qkv =
        std::find_if(specs.begin(), specs.end(), [](const auto& spec) { return spec.name == "qkv.weight"; });
    CHECK(matrices(*qkv, split) ==
          (split == "heads" ? std::vector<std::size_t>(8, 4) : std::vector<std::size_t>{8, 8, 4, 4, 4, 4}));
    const OptionValue value{split}, fp32{std::string("fp32")};
    CHECK(compare("muon", {{"matmuls", fp32}, {"split", value}}, muon(false, false, split)).error < 1e-6);
    CHECK(compare("muon", {{"split", value}}, muon(false, false, split)).distance < 0.01);
    CHECK(compare("muon", {{"matmuls", fp32}, {"split", value}}, muon(false)).error > 1e-4);  // which is another one
  }
}

TEST_CASE("AdamW with moments in 8 bits stays near AdamW") {
  for (const char* format : {"bf16", "int8", "e4m3"}) {
    const OptionValue value{std::string(format)};
    CAPTURE(format);
    CHECK(compare("adamw", {{"moments", value}}, adamw).distance < 0.08);
    CHECK(compare("adamw", {{"moment1", value}}, adamw).distance < 0.08);
    CHECK(compare("adamw", {{"moment2", value}, {"block", std::int64_t{256}}}, adamw).distance < 0.08);
  }
}
