// Rotary embedding against the formula in double precision; its gradient is the inverse rotation.
#include "tests/op_harness.h"

#include "quern/testkit/refusal.h"

using namespace quern;
using namespace quern::cpu::harness;

namespace {

struct Layout {
  std::int64_t heads, kv_heads, head_dim, tokens;
  std::int64_t packed() const { return (heads + 2 * kv_heads) * head_dim; }
};
const Layout kLayouts[] = {{1, 1, 2, 1}, {3, 1, 6, 7}, {2, 2, 34, 17}, {7, 1, 64, 33}, {4, 2, 128, 40}};
constexpr std::int64_t kSequence = 50;
constexpr DType kDtypes[] = {DType::f32, DType::bf16};

Attributes attributes_of(const Layout& layout, double magnitude) {
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < layout.head_dim / 2; ++i) {
    frequencies.push_back(std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(layout.head_dim)));
  }
  return {{"heads", layout.heads},
          {"kv_heads", layout.kv_heads},
          {"head_dim", layout.head_dim},
          {"inverse_frequencies", frequencies},
          {"magnitude", magnitude}};
}

/// Positions restart, as with packed documents.
PoisonedTensor positions_of(std::int64_t tokens) {
  std::vector<float> positions;
  for (std::int64_t i = 0; i < tokens; ++i) positions.push_back(static_cast<float>((i * 7 + 3) % kSequence));
  return PoisonedTensor(DType::i32, {tokens}, positions);
}

Doubles reference(const Layout& layout, const Attributes& attributes, const PoisonedTensor& positions,
                  const Doubles& x) {
  const std::vector<double>& frequencies = attributes.list("inverse_frequencies");
  double magnitude = attributes.real("magnitude");
  Doubles y = x;
  auto half = static_cast<std::size_t>(layout.head_dim / 2), packed = static_cast<std::size_t>(layout.packed());
  for (std::size_t token = 0; token < x.size() / packed; ++token) {
    for (std::size_t head = 0; head < static_cast<std::size_t>(layout.heads + layout.kv_heads); ++head) {
      for (std::size_t i = 0; i < half; ++i) {
        double angle = positions.view().as<std::int32_t>()[token] * frequencies[i];
        std::size_t at = token * packed + head * 2 * half + i;
        y[at] = magnitude * (x[at] * std::cos(angle) - x[at + half] * std::sin(angle));
        y[at + half] = magnitude * (x[at + half] * std::cos(angle) + x[at] * std::sin(angle));
      }
    }
  }
  return y;
}

}  // namespace

TEST_CASE("rope is its formula, in place too") {
  for (DType dtype : kDtypes) {
    for (const Layout& layout : kLayouts) {
      Extents size{layout.tokens, layout.packed()};
      CAPTURE(label(dtype, size));
      Attributes attributes = attributes_of(layout, 1.25);
      PoisonedTensor x = normal(dtype, size, 1), y(dtype, size), positions = positions_of(layout.tokens);
      OpRun("rope", attributes, {1, kSequence}).in(x.view()).in(positions.view()).out(y.view()).run();
      CHECK(compare(y.view(), reference(layout, attributes, positions, doubles(x.view()))) == "");
      OpRun("rope", attributes, {1, kSequence}).in(x.view()).in(positions.view()).out(x.view()).run();
      CHECK(difference(x.view(), y.view()) == "");
    }
  }
}

TEST_CASE("rope_grad is the slope of rope, and undoes it") {
  for (DType dtype : kDtypes) {
    for (const Layout& layout : {kLayouts[0], kLayouts[1], kLayouts[2]}) {
      Extents size{layout.tokens, layout.packed()};
      CAPTURE(label(dtype, size));
      Attributes attributes = attributes_of(layout, 1.25);
      PoisonedTensor x = normal(dtype, size, 1), dy = normal(dtype, size, 2), dx(dtype, size),
                     positions = positions_of(layout.tokens);
      OpRun("rope_grad", attributes, {1, kSequence}).in(dy.view()).in(positions.view()).out(dx.view()).run();
      auto loss = [&](const Doubles& at) {
        return dot(reference(layout, attributes, positions, at), doubles(dy.view()));
      };
      CHECK(compare(dx.view(), numeric_gradient(loss, doubles(x.view()))) == "");
      OpRun("rope_grad", attributes, {1, kSequence}).in(dy.view()).in(positions.view()).out(dy.view()).run();
      CHECK(difference(dy.view(), dx.view()) == "");
    }
  }
  const Layout layout = kLayouts[3];
  Extents size{layout.tokens, layout.packed()};
  PoisonedTensor x = normal(DType::f32, size, 1), y(DType::f32, size), back(DType::f32, size),
                 positions = positions_of(layout.tokens);
  Attributes attributes = attributes_of(layout, 1.0);
  OpRun("rope", attributes, {1, kSequence}).in(x.view()).in(positions.view()).out(y.view()).run();
  OpRun("rope_grad", attributes, {1, kSequence}).in(y.view()).in(positions.view()).out(back.view()).run();
  CHECK(compare(back.view(), doubles(x.view())) == "");
}

TEST_CASE("longer sequences have the long frequencies, and pairs of frequency 0 are left as they are") {
  const Layout layout{2, 1, 6, 9};
  Attributes attributes = attributes_of(layout, 1.25), expected = attributes;
  attributes.set("long_inverse_frequencies", std::vector<double>{0.5, 0.25, 0.125});
  PoisonedTensor x = normal(DType::f32, {layout.tokens, layout.packed()}, 1), y(DType::f32, {9, layout.packed()}),
                 positions = positions_of(layout.tokens);
  auto check = [&] {
    OpRun("rope", attributes, {1, kSequence}).in(x.view()).in(positions.view()).out(y.view()).run();
    CHECK(compare(y.view(), reference(layout, expected, positions, doubles(x.view()))) == "");
  };
  attributes.set("long_beyond", kSequence);
  check();
  attributes.set("long_beyond", kSequence - 1);
  expected.set("inverse_frequencies", attributes.list("long_inverse_frequencies"));
  check();
  attributes.set("long_inverse_frequencies", std::vector<double>{0.0, 0.0, 0.0});
  OpRun("rope", attributes, {1, kSequence}).in(x.view()).in(positions.view()).out(y.view()).run();
  CHECK(difference(y.view(), x.view()) == "");
}

TEST_CASE("a position outside the sequence is an input error that names the token") {
  const Layout layout = kLayouts[1];
  PoisonedTensor x = normal(DType::f32, {layout.tokens, layout.packed()}, 1);
  for (std::int32_t bad : {-1, static_cast<std::int32_t>(kSequence)}) {
    PoisonedTensor positions = positions_of(layout.tokens);
    positions.view().as<std::int32_t>()[4] = bad;
    const std::string message = testkit::refusal(ErrorCode::input, [&] {
      OpRun("rope", attributes_of(layout, 1.0), {1, kSequence}).in(x.view()).in(positions.view()).out(x.view()).run();
    });
    CHECK(message.find("rope, token 4: position outside the sequence: found " + std::to_string(bad) +
                       ", expected 0 to 49") == 0);
  }
}

TEST_CASE("rope refuses frequencies that do not fit the heads") {
  const Layout layout = kLayouts[1];
  Attributes attributes = attributes_of(layout, 1.0);
  attributes.set("inverse_frequencies", std::vector<double>{1.0, 0.5});
  PoisonedTensor x = normal(DType::f32, {layout.tokens, layout.packed()}, 1), positions = positions_of(layout.tokens);
  CHECK(OpRun("rope", attributes, {1, kSequence}).in(x.view()).in(positions.view()).out(x.view()).refusal() ==
        "rope needs head_dim / 2 inverse_frequencies: found 2 for head_dim 6");
  PoisonedTensor narrow = normal(DType::f32, {layout.tokens, layout.packed() - 6}, 1);
  CHECK(OpRun("rope", attributes_of(layout, 1.0), {1, kSequence})
            .in(narrow.view())
            .in(positions.view())
            .out(narrow.view())
            .refusal() == "rope operand qkv: found (7, 24), expected (7, 30)");
}
