// The passes on the forms a decoder block takes. What each promises is checked as a property of every form; that the
// promises keep the gradients' bits is checked by running them (tests/).
#include <algorithm>
#include <functional>
#include <set>

#include <doctest/doctest.h>

#include "program/passes/choose_saved.h"
#include "program/passes/differentiate.h"
#include "program/passes/fuse.h"
#include "program/passes/lower_precision.h"
#include "program/passes/observe.h"
#include "program/passes/place.h"
#include "program/passes/rotate.h"
#include "quern/error.h"
#include "quern/testkit/tiny_model.h"

using namespace quern;
using testkit::PlainPrecision;
using testkit::TinyModel;
using testkit::TinyModelOptions;

namespace {

const std::vector<Fusion> kFusions = {{"add_rms_norm", "s = add(a, b); y, r = rms_norm(s, w)"},
                                      {"rms_norm_grad_add", "d, dw = rms_norm_grad(dy, x, w, r); g = add(d, e)"},
                                      {"swiglu_and_grad", "y = swiglu(gu); d = swiglu_grad(dy, gu)"}};

const std::vector<Fusion> kProductFusions = {{"matmul_swiglu", "y = matmul(a, b); s = swiglu(y)"},
                                             {"matmul_swiglu_grad", "d = matmul(a, b); g = swiglu_grad(d, gu)"}};

std::vector<TinyModelOptions> forms() {
  return {
      {}, {.tied = true}, {.bias = true}, {.head_norm = true}, {.parallel = true}, {.bias = true, .layer_norm = true}};
}

struct Passes {
  explicit Passes(TinyModelOptions options) : model(options), ops(builtin_ops()) {
    patterns = add_fusions(ops, kFusions);
    parameters = model.parameters();
    ProgramBuilder::Context context{&ops, parameters, DType::f32, false};
    ProgramBuilder embed("embed", context), head("head", context);
    model.embed(embed);
    model.head(head);
    ModelPrograms written{.embed = embed.take(), .blocks = {}, .block_of_layer = {}, .head = head.take()};
    for (std::int64_t kind = 0; kind <= model.block_kind(1); ++kind) {
      ProgramBuilder block("block", context);
      model.block(block, kind);
      written.blocks.push_back(block.take());
    }
    for (std::int64_t layer = 0; layer < 3; ++layer)
      written.block_of_layer.push_back(static_cast<int>(model.block_kind(layer)));
    rotated = rotate(written, ops);
  }
  const Program& block() const { return rotated.blocks.front(); }
  const Program& first_block() const { return rotated.blocks.back(); }
  JointProgram lowered(const Program& program) const {
    return lower_precision(differentiate(program, ops, DType::f32, DType::f32), ops, PlainPrecision()).joint;
  }

  /// For a device that takes what `accepts` does.
  Program fused(
      const Program& program,
      const std::function<bool(const OpInstance&)>& accepts = [](const OpInstance&) { return true; }) const {
    return fuse(program, ops, patterns, {2, 16}, accepts);
  }

  TinyModel model;
  OpSet ops;
  std::vector<FusionPattern> patterns;
  std::vector<ParameterSpec> parameters;
  ModelPrograms rotated;
};

int count_kind(const Program& program, const std::string& kind) {
  return static_cast<int>(
      std::count_if(program.ops.begin(), program.ops.end(), [&](const Op& op) { return op.kind == kind; }));
}

/// Matmuls of operands with one scale each.
class QuantizedPrecision final : public testkit::PlainPrecision {
 public:
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product == Product::loss) return lower_to_matmul(site, lowering);
    const Attributes format{{"format", std::string("e4m3")}};
    auto codes = [&](ValueId x) {
      return lowering.emit("quantize", {x}, format, lowering.program()[x].name + ".e4m3");
    };
    const bool output = site.product == Product::output, weight = site.product == Product::weight_gradient;
    std::vector<ValueId> a = codes(output ? site.x : site.dy);
    std::vector<ValueId> b = weight ? codes(site.x) : lowering.working_copy(site.parameter, "quantize", format);
    lowering.produce("matmul", {weight ? a[2] : a[0], output ? b[0] : b[2], site.bias, a[1], b[1]},
                     {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}});
  }
};

std::vector<std::string> kinds_of(const Program& program) {
  std::vector<std::string> kinds;
  for (const Op& op : program.ops) kinds.push_back(op.kind);
  return kinds;
}

std::set<std::string> gradients_of(const Program& program) {
  std::set<std::string> names;
  for (const Value& value : program.values)
    if (value.role == Role::parameter_grad) names.insert(value.parameter);
  return names;
}

}  // namespace

TEST_CASE("a gelu and its gradient have the form that the model asks for") {
  for (auto [form, name] : {std::pair(Gelu::erf, "erf"), std::pair(Gelu::tanh, "tanh")}) {
    Passes p({.layer_norm = true, .gelu = form});
    const Program joint = p.lowered(p.block()).program;
    for (const char* kind : {"gelu", "gelu_grad"}) {
      REQUIRE(count_kind(joint, kind) == 1);
      auto op = std::find_if(joint.ops.begin(), joint.ops.end(), [kind](const Op& op) { return op.kind == kind; });
      CHECK(op->attributes.word("approximation") == name);
    }
  }
}

TEST_CASE("rotate moves the trailing add to the front of the next program") {
  Passes p({});
  CHECK(p.first_block().inputs.size() == 1);
  CHECK(p.first_block().outputs.size() == 2);
  CHECK(p.block().inputs.size() == 2);
  CHECK(p.block().ops.front().kind == "add");
  CHECK(p.rotated.head.ops.front().kind == "add");
  CHECK(count_kind(p.first_block(), "add") == 1);
  CHECK(count_kind(p.block(), "add") == 2);
}

TEST_CASE("blocks of several kinds are rotated, and the first layer has a program of its own") {
  Passes p({.window = 3});
  REQUIRE(p.rotated.blocks.size() == 3);
  CHECK(p.rotated.block_of_layer == std::vector<int>{2, 1, 0});
  auto window = [&](int program) {
    for (const Op& op : p.rotated.blocks[static_cast<std::size_t>(program)].ops)
      if (op.kind == "attention") return op.attributes.integer_or("window", 0);
    return std::int64_t{-1};
  };
  CHECK(window(0) == 0);
  CHECK(window(1) == 3);
  CHECK(window(2) == 0);
  CHECK(p.rotated.blocks[1].inputs.size() == 2);
  CHECK(p.rotated.blocks[2].inputs.size() == 1);
}

TEST_CASE("differentiate gives every parameter of a program a gradient, and one gradient to the stream") {
  for (const TinyModelOptions& form : forms()) {
    Passes p(form);
    for (const Program* program :
         std::initializer_list<const Program*>{&p.rotated.embed, &p.first_block(), &p.block(), &p.rotated.head}) {
      CAPTURE(program->name);
      JointProgram joint = differentiate(*program, p.ops, DType::f32, DType::bf16);
      check_program(joint.program);
      std::set<std::string> parameters;
      for (const Value& value : program->values)
        if (value.role == Role::parameter) parameters.insert(value.parameter);
      CHECK(gradients_of(joint.program) == parameters);
      for (const Value& value : joint.program.values)
        if (value.role == Role::parameter_grad) CHECK(value.dtype == DType::bf16);
      CHECK((joint.gradient_out != kNoValue) == !program->inputs.empty());
      CHECK((joint.gradient_in == kNoValue) == (program == &p.rotated.head));
    }
  }
}

TEST_CASE("an op without a backward rule is refused by name") {
  Passes p({});
  ProgramBuilder b("odd", {&p.ops, p.parameters, DType::f32, false});
  ValueId x = b.stream(16);
  b.output(b.op("transpose", {x}, "t")[0]);
  Program program = b.take();
  CHECK_THROWS_WITH_AS(differentiate(program, p.ops, DType::f32, DType::f32), doctest::Contains("transpose"), Error);
}

TEST_CASE("wrong shapes in a model's program are refused with the operand and what was expected") {
  Passes p({});
  ProgramBuilder b("wrong", {&p.ops, p.parameters, DType::f32, false});
  ValueId x = b.stream(12);
  CHECK_THROWS_WITH_AS(b.rms_norm(x, "attn_norm.weight", 1e-6, "h"), doctest::Contains("expected (12)"), Error);
  CHECK_THROWS_WITH_AS(b.linear(x, "qvk.weight", "h"), doctest::Contains("qkv.weight"), Error);
}

TEST_CASE("lowering leaves no linear behind and shares only equal ops") {
  for (const TinyModelOptions& form : forms()) {
    Passes p(form);
    JointProgram joint = p.lowered(p.block());
    CHECK(count_kind(joint.program, "linear") == 0);
    CHECK(count_kind(joint.program, "linear_weight_grad") == 0);
    CHECK(count_kind(joint.program, "matmul") == 12);  // four linears, three matmuls each
  }
}

TEST_CASE("every choice of saved values gives two programs that check, and keeps no more than was asked") {
  std::vector<std::vector<std::string>> policies = {
      {}, {"swiglu"}, {"norm"}, {"ffn"}, {"qkv"}, {"att"}, {"swiglu", "norm", "qkv"}, {"block"}};
  for (const TinyModelOptions& form : forms()) {
    Passes p(form);
    for (const Program* program : {&p.first_block(), &p.block()}) {
      JointProgram joint = p.lowered(*program);
      std::size_t all = partition(joint, p.ops, {}).saved.size();
      for (const auto& policy : policies) {
        std::set<std::string> recomputed = recomputed_values(joint, p.ops, policy);
        PartitionedProgram split = partition(joint, p.ops, recomputed);
        CHECK(split.saved.size() <= all);
        CHECK(gradients_of(split.backward).size() == gradients_of(joint.program).size());
        bool only_stream = policy == std::vector<std::string>{"block"};
        if (only_stream) CHECK(split.saved == std::vector<std::string>{"x"});
      }
    }
  }
}

TEST_CASE("the path from recomputing everything to nothing trades bytes for time") {
  Passes p({});
  JointProgram joint = p.lowered(p.block());
  auto bytes = [](const Value& value) {
    return static_cast<double>(element_count(extents_at(value.shape, {1, 64}))) * 4;
  };
  auto seconds = [](const Program& program) { return static_cast<double>(program.ops.size()); };
  auto path = recompute_path(joint, p.ops, bytes, seconds);
  REQUIRE(path.size() > 2);
  CHECK(partition(joint, p.ops, path.front()).saved == std::vector<std::string>{"x"});
  double last = 1e30;
  for (const auto& recomputed : path) {
    PartitionedProgram split = partition(joint, p.ops, recomputed);
    CHECK(seconds(split.backward) < last);
    last = seconds(split.backward);
  }
  CHECK(last == seconds(partition(joint, p.ops, {}).backward));
}

TEST_CASE("fusion finds residual add with norm, norm backward with add, and swiglu recomputed beside its gradient") {
  Passes p({});
  JointProgram joint = p.lowered(p.block());
  PartitionedProgram split = partition(joint, p.ops, recomputed_values(joint, p.ops, {"swiglu"}));
  Program forward = p.fused(split.forward), backward = p.fused(split.backward);
  CHECK(count_kind(forward, "add_rms_norm") == 2);
  CHECK(count_kind(forward, "add") == 0);
  CHECK(count_kind(backward, "rms_norm_grad_add") == 2);
  CHECK(count_kind(backward, "swiglu_and_grad") == 1);
  CHECK(count_kind(backward, "swiglu") == 0);
}

TEST_CASE("fusion finds a matmul with the swiglu that reads it, and with its gradient") {
  for (const TinyModelOptions& form : forms()) {
    Passes p(form);
    p.patterns = add_fusions(p.ops, kProductFusions);
    const PartitionedProgram split = partition(p.lowered(p.block()), p.ops, {});
    const int gated = form.layer_norm ? 0 : 1;
    CHECK(count_kind(split.forward, "swiglu") == gated);
    CHECK(count_kind(p.fused(split.forward), "matmul_swiglu") == gated);
    CHECK(count_kind(p.fused(split.backward), "matmul_swiglu_grad") == gated);
  }
}

TEST_CASE("a fused form costs its matmuls' work, and moves each operand once") {
  Passes p({});
  p.patterns = add_fusions(p.ops, kProductFusions);
  auto operand = [](Extents extents, bool present = true) {
    return Operand{DType::bf16, std::move(extents), present, false};
  };
  OpInstance op{.kind = "matmul_swiglu",
                .inputs = {operand({64, 16}), operand({48, 16})},
                .outputs = {operand({64, 48}), operand({64, 24})},
                .attributes = {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}},
                .geometry = {}};
  Cost cost = cost_of(p.ops.at(op.kind), op);
  CHECK(cost.tensor_core);
  CHECK(cost.format == DType::bf16);
  CHECK(cost.flops == 2.0 * 64 * 48 * 16);
  CHECK(cost.bytes == 2.0 * (64 * 16 + 48 * 16 + 64 * 48 + 64 * 24));
  op.outputs[0].present = false;
  CHECK(cost_of(p.ops.at(op.kind), op).flops == cost.flops);
  CHECK(cost_of(p.ops.at(op.kind), op).bytes == cost.bytes - 2.0 * 64 * 48);
  const OpInstance plain{.kind = "swiglu_and_grad",
                         .inputs = {operand({4, 8}), operand({4, 4})},
                         .outputs = {operand({4, 4}), operand({4, 8})},
                         .attributes = {},
                         .geometry = {}};
  CHECK_FALSE(cost_of(Passes({}).ops.at(plain.kind), plain).tensor_core);
}

TEST_CASE("a form that the device refuses stays in parts, beside one of the same kind that it takes") {
  Passes p({});
  p.patterns = add_fusions(p.ops, kProductFusions);
  Program program;
  program.name = "two";
  const ValueId x =
      program.add_value({.name = "x", .shape = {Dim::tokens(), 16}, .dtype = DType::bf16, .role = Role::boundary});
  program.inputs = {x};
  for (std::int64_t width : {48, 80}) {
    const std::string name = "w" + std::to_string(width);
    const ValueId w = program.add_value(
        {.name = name, .shape = {width, 16}, .dtype = DType::bf16, .role = Role::parameter, .parameter = name});
    const Attributes layout{{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}};
    const ValueId product =
        append_op(program, p.ops, DType::bf16, {.kind = "matmul", .inputs = {x, w, kNoValue}, .attributes = layout},
                  name + ".y")[0];
    program.outputs.push_back(
        append_op(program, p.ops, DType::bf16, {.kind = "swiglu", .inputs = {product}}, name + ".s")[0]);
  }
  std::vector<OpInstance> asked;
  const Program got = p.fused(program, [&](const OpInstance& op) {
    asked.push_back(op);
    return op.inputs[1].extents[0] == 80;
  });
  CHECK(kinds_of(got) == std::vector<std::string>{"matmul", "swiglu", "matmul_swiglu"});
  CHECK(kinds_of(p.fused(program, [](const OpInstance&) { return false; })) == kinds_of(program));
  CHECK(kinds_of(p.fused(program)) == std::vector<std::string>(2, "matmul_swiglu"));
  REQUIRE(asked.size() >= 2);
  const OpInstance& first = asked.front();
  CHECK(first.kind == "matmul_swiglu");
  CHECK(first.attributes == program.ops[0].attributes);
  CHECK(first.geometry == Geometry{2, 16});
  REQUIRE(first.inputs.size() == 2);
  CHECK(first.inputs[0] == Operand{DType::bf16, {32, 16}, true});
  CHECK(first.inputs[1] == Operand{DType::bf16, {48, 16}, true});
  REQUIRE(first.outputs.size() == 2);
  CHECK(first.outputs[0] == Operand{DType::bf16, {32, 48}, false});  // read within the fused form alone
  CHECK(first.outputs[1] == Operand{DType::bf16, {32, 24}, true});
}

TEST_CASE("a pattern matches matmuls with scales, and without the bias that it says is not there") {
  Passes p({});
  p.patterns = add_fusions(p.ops, std::vector<Fusion>{{"scaled_swiglu", "y = matmul(a, b, _, s, t); z = swiglu(y)"}});
  CHECK(parse_fusion({"trailing", "y = matmul(a, b, _)"}, p.ops).parts[0].inputs.size() == 2);
  for (bool biased : {false, true}) {
    Program program;
    program.name = "scaled";
    auto add = [&](const char* name, std::vector<Dim> shape, DType dtype) {
      program.inputs.push_back(
          program.add_value({.name = name, .shape = std::move(shape), .dtype = dtype, .role = Role::boundary}));
      return program.inputs.back();
    };
    const ValueId a = add("a", {Dim::tokens(), 16}, DType::e4m3), b = add("b", {32, 16}, DType::e4m3),
                  bias = add("bias", {32}, DType::bf16), s = add("s", {1}, DType::f32), t = add("t", {1}, DType::f32);
    const ValueId y = append_op(program, p.ops, DType::bf16,
                                {.kind = "matmul",
                                 .inputs = {a, b, biased ? bias : kNoValue, s, t},
                                 .attributes = {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}}},
                                "y")[0];
    program.outputs = append_op(program, p.ops, DType::bf16, {.kind = "swiglu", .inputs = {y}}, "z");
    const Program got = p.fused(program);
    if (biased) {
      CHECK(kinds_of(got) == kinds_of(program));
      continue;
    }
    REQUIRE(kinds_of(got) == std::vector<std::string>{"scaled_swiglu"});
    CHECK(got.ops[0].inputs == std::vector<ValueId>{a, b, s, t});
    const OpInstance op = instantiate(got, got.ops[0], {2, 16}, read_values(got));
    CHECK(cost_of(p.ops.at("scaled_swiglu"), op).flops == 2.0 * 32 * 32 * 16);
  }
}

TEST_CASE("a fused form whose output sums up is asked about writing and adding, and taken with both") {
  Passes p({});
  const Program backward = partition(p.lowered(p.block()), p.ops, {}).backward;
  std::set<bool> asked;
  auto is_grad = [](const OpInstance& op) { return op.kind == "rms_norm_grad_add"; };
  CHECK(count_kind(p.fused(backward,
                           [&](const OpInstance& op) {
                             if (is_grad(op)) asked.insert(op.outputs[1].accumulate);
                             for (std::size_t o : {0, 2}) CHECK_FALSE((is_grad(op) && op.outputs[o].accumulate));
                             return true;
                           }),
                   "rms_norm_grad_add") == 2);
  CHECK(asked == std::set<bool>{false, true});
  for (bool refused : {false, true})
    CHECK(count_kind(p.fused(backward,
                             [&](const OpInstance& op) { return !is_grad(op) || op.outputs[1].accumulate != refused; }),
                     "rms_norm_grad_add") == 0);
}

TEST_CASE("a form refused in steps that observe, or in the others, stays in parts") {
  Passes p({});
  p.patterns = add_fusions(p.ops, std::vector<Fusion>{{"swiglu_quantize", "y = swiglu(gu); q, sc, t = quantize(y)"}});
  JointProgram observed =
      lower_precision(differentiate(p.block(), p.ops, DType::f32, DType::f32), p.ops, QuantizedPrecision()).joint;
  observe_scales(observed.program, p.ops);
  const Program forward = partition(observed, p.ops, {}).forward;
  CHECK(count_kind(p.fused(forward), "swiglu_quantize") == 1);
  for (bool swiglu_read : {false, true})
    CHECK(count_kind(p.fused(forward, [&](const OpInstance& op) { return op.outputs[0].present != swiglu_read; }),
                     "swiglu_quantize") == 0);
}

TEST_CASE("observed, a program runs the same ops and those that observe, and unobserved the same ops alone") {
  Passes p({});
  p.patterns = add_fusions(p.ops, std::vector<Fusion>{{"swiglu_quantize", "y = swiglu(gu); q, sc, t = quantize(y)"}});
  const JointProgram joint =
      lower_precision(differentiate(p.block(), p.ops, DType::f32, DType::f32), p.ops, QuantizedPrecision()).joint;
  JointProgram observed = joint;
  observe_scales(observed.program, p.ops);
  CHECK(count_kind(observed.program, "observe_scale") == count_kind(joint.program, "quantize"));
  for (const auto& policy : {std::vector<std::string>{}, {"ffn"}, {"block"}}) {
    const PartitionedProgram plain = partition(joint, p.ops, recomputed_values(joint, p.ops, policy));
    const PartitionedProgram split = partition(observed, p.ops, recomputed_values(observed, p.ops, policy));
    CHECK(split.saved == plain.saved);
    for (auto half : {&PartitionedProgram::forward, &PartitionedProgram::backward}) {
      const Program want = p.fused(plain.*half), got = p.fused(split.*half);
      const Unobserved rest = without_observations(got);
      std::vector<std::string> kinds;
      for (std::size_t i = 0; i < got.ops.size(); ++i) {
        if (!rest.runs[i]) continue;
        kinds.push_back(got.ops[i].kind);
        const Op& same = want.ops[kinds.size() - 1];
        const std::vector<bool> read = read_values(want);
        for (std::size_t o = 0; o < same.outputs.size(); ++o)
          CHECK(rest.read[static_cast<std::size_t>(got.ops[i].outputs[o])] ==
                read[static_cast<std::size_t>(same.outputs[o])]);
      }
      CHECK(kinds == kinds_of(want));
    }
  }
}

TEST_CASE("a fused op works in the memory that its parts did, also through a value between them") {
  const OpSet ops = builtin_ops();
  using Pairs = std::vector<std::pair<int, int>>;
  auto overwrites = [&](const char* pattern) {
    Pairs pairs = fused_spec(parse_fusion({"fused", pattern}, ops), ops).may_overwrite;
    std::sort(pairs.begin(), pairs.end());
    return pairs;
  };
  CHECK(overwrites("d = rope_grad(dy, p); dx, dq, dk = head_norm_grad(d, x, qw, kw, r)") == Pairs{{0, 0}, {1, 0}});
  CHECK(overwrites("d, dw = rms_norm_grad(dy, x, w, r); g = add(d, e)") == Pairs{{0, 0}, {2, 0}, {2, 4}});
  CHECK(overwrites("s = add(a, b); y, r = rms_norm(s, w)") == Pairs{{0, 0}, {0, 1}, {1, 0}, {1, 1}});
  // Not where the value between, or what it was made of, is read later.
  CHECK(overwrites("s = scale(x); y = scale(s); z = add(s, y)") == Pairs{{0, 0}, {2, 0}});
  CHECK(overwrites("s = scale(x); y = scale(s); z = add(x, y)") == Pairs{{2, 0}});
  CHECK(overwrites("s = swiglu(x); y = scale(s)").empty());
}

TEST_CASE("a pattern that cannot be read is refused with what was expected") {
  OpSet ops = builtin_ops();
  CHECK_THROWS_WITH_AS(parse_fusion({"bad", "y = add(a, b"}, ops), doctest::Contains("`)`"), Error);
  CHECK_THROWS_WITH_AS(parse_fusion({"bad", "y = rms_norm(a, b)"}, ops), doctest::Contains("2 results"), Error);
  CHECK_THROWS_WITH_AS(parse_fusion({"bad", "y = rms_nrom(a, b)"}, ops), doctest::Contains("rms_norm"), Error);
  CHECK_THROWS_WITH_AS(parse_fusion({"bad", "_ = add(a, b)"}, ops), doctest::Contains("have names"), Error);
}

TEST_CASE("placed values that live at the same time do not overlap") {
  for (const TinyModelOptions& form : forms()) {
    Passes p(form);
    JointProgram joint = p.lowered(p.block());
    PartitionedProgram split = partition(joint, p.ops, recomputed_values(joint, p.ops, {"ffn", "att"}));
    Program program = p.fused(split.backward);
    Geometry geometry{3, 7};
    PlacedProgram placed = place(
        program, p.ops, geometry, 64, [](const Op& op) { return op.kind == "matmul" ? 100 : 0; }, program.outputs);
    std::vector<bool> read = read_values(program);
    auto size = [&](ValueId id) { return element_count(extents_at(program[id].shape, geometry)) * 4; };
    std::int64_t total = 0;
    for (ValueId a = 0; a < static_cast<ValueId>(program.values.size()); ++a) {
      if (placed.offsets[static_cast<std::size_t>(a)] < 0) continue;
      total += size(a);
      CHECK(placed.offsets[static_cast<std::size_t>(a)] % 64 == 0);
      CHECK(placed.offsets[static_cast<std::size_t>(a)] + size(a) <= placed.bytes);
      for (ValueId b = 0; b < a; ++b) {
        if (placed.offsets[static_cast<std::size_t>(b)] < 0) continue;
        // b is read after a is made, and the other way round: both are needed at one time.
        auto needed_after = [&](ValueId value, ValueId other) {
          std::vector<int> readers = program.consumers(value);
          return !readers.empty() && readers.back() > program.producer(other) &&
                 program.producer(value) <= program.producer(other);
        };
        if (!needed_after(a, b) && !needed_after(b, a)) continue;
        std::int64_t a0 = placed.offsets[static_cast<std::size_t>(a)], b0 = placed.offsets[static_cast<std::size_t>(b)];
        CAPTURE(program[a].name);
        CAPTURE(program[b].name);
        CHECK((a0 + size(a) <= b0 || b0 + size(b) <= a0));
      }
    }
    CHECK(placed.bytes < total);  // memory is reused
  }
}

TEST_CASE("a program prints one op a line, with shapes") {
  Passes p({});
  std::string text = to_string(p.first_block());
  CHECK(text.find("%attn_norm, %attn_norm.rstd = rms_norm(^x, $attn_norm.weight) {eps = 1e-06}") != std::string::npos);
  CHECK(text.find("# (N, 16) f32") != std::string::npos);
}
