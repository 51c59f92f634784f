// How far 8-bit matmuls may turn and scale gradients, on a small model; gradient_table prints the same for larger
// ones.
#include "gradient_comparison.h"

#include <cmath>

#include <doctest/doctest.h>

#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;

TEST_CASE("agreement is measured over the layers as one vector, and for the worst of them") {
  Agreement same = agreement({{3, 4}, {0, 12}}, {{3, 4}, {0, 12}});
  CHECK(same.cosine == doctest::Approx(1));
  CHECK(same.norm_ratio == doctest::Approx(1));
  CHECK(same.least == doctest::Approx(1));
  Agreement turned = agreement({{4, -3}, {0, 24}}, {{3, 4}, {0, 12}});  // the first at a right angle
  CHECK(turned.cosine == doctest::Approx(288 / std::sqrt(601.0 * 169)));
  CHECK(turned.norm_ratio == doctest::Approx(std::sqrt(601.0 / 169)));
  CHECK(turned.least == doctest::Approx(0));
}

namespace {

struct Bounds {
  double cosine;  ///< least, of each tensor
  double norm;    ///< farthest from 1, of each parameter's norm ratio
};

// Rounding moves a value by 2.6% in e4m3, 5.1% in e5m2 and 0.16% in bf16 (root mean square of a uniform error over a
// binade), so a matmul whose operands both round has an error of r^2 = e_a^2 + e_b^2. About eight matmuls of this
// model stand behind a gradient: 1 - cosine = 8 r^2 / 2 is 0.5% for e4m3, 1.3% with one operand in e5m2 and 0.002%
// for bf16, and the bounds allow twice that or more. In int8 the error is a step of amax / 127 over sqrt(12), which
// is 0.7% of values whose largest is three deviations: 0.04%, and more where few values make most of a row's
// gradient. Norms: the gradient of an unlikely target, p - 1, rounds to -1 in a quantized head, and this does not
// average out.
Bounds bounds_of(const std::string& recipe) {
  if (recipe == "fp32") return {1 - 1e-12, 1e-12};
  if (recipe == "bf16") return {0.9998, 0.01};
  if (recipe.starts_with("int8")) return {0.998, 0.02};
  if (recipe.find("head bf16") != std::string::npos) return {0.99, 0.04};
  return {recipe.find("e5m2") == std::string::npos ? 0.99 : 0.97, 0.08};
}

}  // namespace

TEST_CASE("gradients of every recipe point where fp32's do") {
  TinyFiles files;
  GradientProbe probe(ConfigDocument::read(files.config()), 10);
  const std::vector<GradientRecipe> recipes = gradient_recipes();
  const ParameterTensors want = probe.gradients(recipes[0]);
  for (const GradientRecipe& recipe : recipes) {
    const ParameterTensors got = probe.gradients(recipe);
    CHECK((got == want) == (recipe.name == "fp32"));
    REQUIRE(got.size() == want.size());
    for (const std::string& parameter : probe.parameters()) {
      CAPTURE(recipe.name);
      CAPTURE(parameter);
      Agreement found = agreement(got.at(parameter), want.at(parameter));
      CHECK(found.least > bounds_of(recipe.name).cosine);
      CHECK(std::fabs(found.norm_ratio - 1) < bounds_of(recipe.name).norm);
    }
  }
}
