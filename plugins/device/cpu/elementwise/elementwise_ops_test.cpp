// Elementwise ops against their definitions in double precision, gradients against finite differences of them.
#include "tests/op_harness.h"

#include "quern/numeric.h"
#include "quern/step_state.h"

using namespace quern;
using namespace quern::cpu::harness;

namespace {

constexpr DType kDtypes[] = {DType::f32, DType::bf16};
const Extents kSizes[] = {{1, 1}, {3, 7}, {17, 3}, {33, 17}, {5, 1031}};  // the last spans blocks of elements

double silu(double x) { return x / (1 + std::exp(-x)); }

double gelu(double x, bool tanh) {
  if (tanh) return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
  return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
}

/// gate_up (N, 2 F) -> (N, F)
Doubles gated(const std::string& kind, const Doubles& gate_up, std::size_t width) {
  Doubles y(gate_up.size() / 2);
  for (std::size_t i = 0; i < y.size(); ++i) {
    std::size_t gate = i / width * 2 * width + i % width;
    const double x = gate_up[gate];
    y[i] = (kind == "swiglu" ? silu(x) : gelu(x, true)) * gate_up[gate + width];
  }
  return y;
}
Doubles swiglu(const Doubles& gate_up, std::size_t width) { return gated("swiglu", gate_up, width); }

/// From -12 to 12 with many points, so that tails and the middle are seen.
PoisonedTensor ramp(DType dtype, std::int64_t count) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i)
    values.push_back(round_to(dtype, -12.0f + 24.0f * static_cast<float>(i) / static_cast<float>(count - 1)));
  return PoisonedTensor(dtype, {count}, values);
}

}  // namespace

TEST_CASE("add adds, in place too, and mixes dtypes") {
  for (DType dtype : kDtypes) {
    for (const Extents& size : kSizes) {
      CAPTURE(label(dtype, size));
      PoisonedTensor a = normal(dtype, size, 1), b = normal(DType::f32, size, 2), y(dtype, size), sum(DType::f32, size);
      OpRun("add").in(a.view()).in(b.view()).out(y.view()).run();
      CHECK(compare(y.view(), plus(doubles(a.view()), doubles(b.view()))) == "");
      OpRun("add").in(a.view()).in(b.view()).out(sum.view()).run();
      CHECK(compare(sum.view(), plus(doubles(a.view()), doubles(b.view()))) == "");
      OpRun("add").in(a.view()).in(b.view()).out(b.view()).run();
      CHECK(difference(b.view(), sum.view()) == "");
    }
  }
}

TEST_CASE("swiglu and geglu are their definitions, and their gradients their slopes") {
  for (const std::string kind : {"swiglu", "geglu"})
    for (DType dtype : kDtypes) {
      for (const Extents& size : {kSizes[0], kSizes[1], kSizes[2], kSizes[3]}) {
        CAPTURE(label(dtype, size));
        auto width = static_cast<std::size_t>(size[1]);
        Extents packed{size[0], 2 * size[1]};
        PoisonedTensor gate_up = normal(dtype, packed, 1, 0, 2), dy = normal(dtype, size, 2), y(dtype, size),
                       d(dtype, packed);
        OpRun(kind).in(gate_up.view()).out(y.view()).run();
        CHECK(compare(y.view(), gated(kind, doubles(gate_up.view()), width)) == "");
        OpRun(kind + "_grad").in(dy.view()).in(gate_up.view()).out(d.view()).run();
        auto loss = [&](const Doubles& at) { return dot(gated(kind, at, width), doubles(dy.view())); };
        CHECK(compare(d.view(), numeric_gradient(loss, doubles(gate_up.view()))) == "");
      }
    }
}

TEST_CASE("scale and soft_cap are their definitions, in place too") {
  for (DType dtype : kDtypes) {
    for (std::int64_t count : {3, 33, 5001}) {
      CAPTURE(label(dtype, {count}));
      PoisonedTensor x = ramp(dtype, count), scaled(dtype, {count}), capped(dtype, {count});
      Doubles want = doubles(x.view()), bent = want;
      for (double& value : want) value *= 1.7;
      for (double& value : bent) value = 3 * std::tanh(value / 3);
      OpRun("scale", {{"factor", 1.7}}).in(x.view()).out(scaled.view()).run();
      CHECK(compare(scaled.view(), want) == "");
      OpRun("soft_cap", {{"cap", 3.0}}).in(x.view()).out(capped.view()).run();
      CHECK(compare(capped.view(), bent) == "");
      OpRun("soft_cap", {{"cap", 3.0}}).in(x.view()).out(x.view()).run();
      CHECK(difference(x.view(), capped.view()) == "");
    }
  }
}

TEST_CASE(
    "dropout drops its share, of other elements in each step, micro-step and op, and its gradient the same ones") {
  const std::int64_t count = 40000;
  for (DType dtype : kDtypes) {
    CAPTURE(name_of(dtype));
    std::vector<float> ones(count, 1.0f);
    PoisonedTensor x = ramp(dtype, count), dy(dtype, {count}, ones);
    auto kept = [&](const StepState& state, std::int64_t object, double probability) {
      PoisonedTensor step(DType::u32, {16}), y(dtype, {count}), dx(dtype, {count});
      std::memcpy(step.view().data, &state, sizeof state);
      const Attributes attributes{{"probability", probability}, {"object", object}};
      OpRun("dropout", attributes).in(x.view()).in(step.view()).out(y.view()).run();
      OpRun("dropout_grad", attributes).in(dy.view()).in(x.view()).in(step.view()).out(dx.view()).run();
      std::vector<bool> kept;
      const std::vector<float> values = x.floats(), dropped = y.floats(), gradient = dx.floats();
      const float factor =
          PoisonedTensor(dtype, {1}, std::vector<float>{static_cast<float>(1 / (1 - probability))}).floats()[0];
      for (std::size_t i = 0; i < values.size(); ++i) {
        kept.push_back(gradient[i] != 0);
        const float want = kept[i] ? values[i] / static_cast<float>(1 - probability) : 0.0f;
        if (!(std::abs(dropped[i] - want) <= 0.01f * std::abs(want)) ||
            !(gradient[i] == 0 || std::abs(gradient[i] - factor) <= 0.01f * factor))
          FAIL("element " << i << ": " << dropped[i] << ", expected " << want << "; gradient " << gradient[i]);
      }
      return kept;
    };
    auto share = [&](const std::vector<bool>& mask) {
      return static_cast<double>(std::count(mask.begin(), mask.end(), false)) / count;
    };
    const StepState state{.step = 3, .micro_step = 1, .seed_low = 7};
    for (double probability : {0.05, 0.5, 0.9})  // five standard deviations are 0.0125
      CHECK(std::abs(share(kept(state, 0, probability)) - probability) < 0.0125);
    const std::vector<bool> mask = kept(state, 0, 0.5);
    CHECK(kept(state, 0, 0.5) == mask);
    for (const StepState& other :
         {StepState{.step = 4, .micro_step = 1, .seed_low = 7}, StepState{.step = 3, .micro_step = 2, .seed_low = 7},
          StepState{.step = 3, .micro_step = 1, .seed_low = 7, .seed_high = 1}}) {
      const std::vector<bool> another = kept(other, 0, 0.5);
      std::vector<bool> differs(mask.size());
      for (std::size_t i = 0; i < mask.size(); ++i) differs[i] = mask[i] == another[i];
      CHECK(std::abs(share(differs) - 0.5) < 0.0125);
    }
    CHECK(kept(state, 1, 0.5) != mask);
  }
}

TEST_CASE("swiglu holds at large gates, and passes NaN on") {
  std::vector<float> values = {-1000.0f, -90.0f, -20.0f, 0.0f, 20.0f, 90.0f, 1000.0f, NAN};
  std::vector<float> packed = values;
  packed.insert(packed.end(), values.size(), 1.0f);
  PoisonedTensor gate_up(DType::f32, {1, 16}, packed), y(DType::f32, {1, 8}),
      dy(DType::f32, {1, 8}, std::vector<float>(8, 1.0f));
  PoisonedTensor d(DType::f32, {1, 16});
  OpRun("swiglu").in(gate_up.view()).out(y.view()).run();
  CHECK(compare(y.view(), swiglu(doubles(gate_up.view()), 8)) == "");
  OpRun("swiglu_grad").in(dy.view()).in(gate_up.view()).out(d.view()).run();
  std::vector<float> slopes = d.floats();
  CHECK(slopes[0] == doctest::Approx(0).epsilon(1e-6));
  CHECK(slopes[6] == 1.0f);
  CHECK(std::isnan(slopes[7]));
}

TEST_CASE("swiglu_and_grad gives the bits of swiglu and swiglu_grad") {
  for (DType dtype : kDtypes) {
    for (const Extents& size : kSizes) {
      CAPTURE(label(dtype, size));
      Extents packed{size[0], 2 * size[1]};
      PoisonedTensor gate_up = normal(dtype, packed, 1, 0, 3), dy = normal(dtype, size, 2);
      PoisonedTensor y(dtype, size), d(dtype, packed), fused_y(dtype, size), fused_d(dtype, packed);
      OpRun("swiglu").in(gate_up.view()).out(y.view()).run();
      OpRun("swiglu_grad").in(dy.view()).in(gate_up.view()).out(d.view()).run();
      OpRun("swiglu_and_grad").in(gate_up.view()).in(dy.view()).out(fused_y.view()).out(fused_d.view()).run();
      CHECK(difference(fused_y.view(), y.view()) == "");
      CHECK(difference(fused_d.view(), d.view()) == "");
      PoisonedTensor over_y = copy_of(dy.view()),
                     over_d = copy_of(gate_up.view());  // in place: y over dy, d over gate_up
      OpRun("swiglu_and_grad").in(over_d.view()).in(over_y.view()).out(over_y.view()).out(over_d.view()).run();
      CHECK(difference(over_y.view(), y.view()) == "");
      CHECK(difference(over_d.view(), d.view()) == "");
    }
  }
}

TEST_CASE("gelu is its definition down its tails, and gelu_grad its slope") {
  for (DType dtype : kDtypes) {
    for (const char* approximation : {"erf", "tanh"}) {
      for (std::int64_t count : {3, 33, 5001}) {
        CAPTURE(label(dtype, {count}) + approximation);
        bool tanh = approximation[0] == 't';
        Attributes attributes{{"approximation", std::string(approximation)}};
        PoisonedTensor x = ramp(dtype, count), dy = normal(dtype, {count}, 2), y(dtype, {count}), dx(dtype, {count});
        OpRun("gelu", attributes).in(x.view()).out(y.view()).run();
        OpRun("gelu_grad", attributes).in(dy.view()).in(x.view()).out(dx.view()).run();
        Doubles at = doubles(x.view()), up = doubles(dy.view()), want(at.size()), slope(at.size());
        for (std::size_t i = 0; i < at.size(); ++i) {
          want[i] = gelu(at[i], tanh);
          slope[i] = up[i] * (gelu(at[i] + 1e-5, tanh) - gelu(at[i] - 1e-5, tanh)) / 2e-5;
        }
        // The exponent rounds at up to 72 (x = 12), 2^-18 of the value; below 1e-30 fast_exp's clamp adds its own
        // floor. The tanh reference itself cancels to 1 + tanh = 2^-53.
        std::vector<float> rounded(want.begin(), want.end());
        CHECK(testkit::mismatch(y.floats(), rounded, 1e-5 + (dtype == DType::bf16 ? 0x1p-8 : 0),
                                tanh ? 1e-14 : 1e-30) == "");
        CHECK(compare(dx.view(), slope) == "");
        PoisonedTensor over = copy_of(dy.view());
        OpRun("gelu_grad", attributes).in(over.view()).in(x.view()).out(over.view()).run();
        CHECK(difference(over.view(), dx.view()) == "");
      }
    }
  }
}

TEST_CASE("column_sum sums tokens, adds when asked, and does not depend on threads") {
  for (DType dtype : kDtypes) {
    for (const Extents& size : {Extents{1, 1}, Extents{3, 7}, Extents{33, 17}, Extents{131, 1031}}) {
      CAPTURE(label(dtype, size));
      auto columns = static_cast<std::size_t>(size[1]);
      PoisonedTensor x = normal(dtype, size, 1), sum(dtype, {size[1]}), total = normal(dtype, {size[1]}, 2);
      Doubles values = doubles(x.view()), want(columns), before = doubles(total.view());
      for (std::size_t i = 0; i < values.size(); ++i) want[i % columns] += values[i];
      OpRun("column_sum").in(x.view()).out(sum.view()).run();
      CHECK(compare(sum.view(), want) == "");
      OpRun("column_sum").in(x.view()).out(total.view(), true).run();
      CHECK(compare(total.view(), plus(want, before)) == "");
      for (int threads : {1, 3, 5}) {
        Threads set(threads);
        PoisonedTensor again(dtype, {size[1]});
        OpRun("column_sum").in(x.view()).out(again.view()).run();
        CHECK(difference(again.view(), sum.view()) == "");
      }
    }
  }
}

TEST_CASE("elementwise ops refuse operands that do not fit") {
  PoisonedTensor x = normal(DType::f32, {3, 7}, 1), y(DType::f32, {3, 7}), narrow(DType::f32, {3, 6});
  CHECK(OpRun("add").in(x.view()).in(narrow.view()).out(y.view()).refusal() ==
        "add operand b: found (3, 6), expected (3, 7)");
  CHECK(OpRun("swiglu").in(x.view()).out(y.view()).refusal() == "swiglu needs an even number of columns in gate_up");
  CHECK(OpRun("gelu", {{"approximation", std::string("sine")}}).in(x.view()).out(y.view()).refusal() ==
        "gelu approximation: found sine, expected erf or tanh");
  CHECK(OpRun("add").in(x.view()).in(x.view()).out(y.view(), true).refusal() == "add operand y: cannot be added to");
}
