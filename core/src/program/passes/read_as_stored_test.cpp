// The matmuls of one linear over values with one scale a tensor, whose operands are copies that the program makes.
#include "program/passes/read_as_stored.h"

#include <set>
#include <string>

#include <doctest/doctest.h>

#include "quern/step_state.h"

using namespace quern;

namespace {

using Accepts = std::function<bool(const OpInstance&)>;

bool turned_a(const OpInstance& op) { return op.attributes.integer("transpose_a") == 1; }
bool turned_b(const OpInstance& op) { return op.attributes.integer("transpose_b") == 0; }
bool any(const OpInstance&) { return true; }
bool none(const OpInstance&) { return false; }
bool one(const OpInstance& op) { return !turned_a(op) || !turned_b(op); }

/// Every matmul that is taken costs the same, and nothing else anything.
StoredCosts costs(const Accepts& accepts) {
  return {.takes = accepts, .seconds = [](const Program&) { return 0.0; }};
}

/// y = x W^T, dx = dy W and dW = dy^T x, of x (N, 16) and W (48, 16).
struct Products {
  explicit Products(const std::string& quantize = "quantize") {
    Program& program = joint.program;
    program.name = "products";
    const ValueId x = value("x", {Dim::tokens(), 16}, Role::boundary);
    const ValueId dy = value("dy", {Dim::tokens(), 48}, Role::boundary);
    program.inputs = {x};
    joint.gradient_in = dy;
    const ValueId w = value("w", {48, 16}, Role::parameter);
    program[w].dtype = DType::e4m3;
    const Codes a = codes(quantize, x, "x"), b = codes(quantize, dy, "dy");
    const ValueId w_t = append("transpose", {w}, "w.t")[0];
    program.outputs = {product(a.q, w, "y")};
    joint.gradient_out = product(b.q, w_t, "dx");
    dw = product(b.t, a.t, "dw");
    program[dw].role = Role::parameter_grad;
    program[dw].parameter = "w";
  }

  struct Codes {
    ValueId q, t;
  };
  Codes codes(const std::string& kind, ValueId x, const std::string& name) {
    Attributes attributes{{"format", std::string("e4m3")}};
    std::vector<ValueId> inputs{x};
    if (kind == "quantize_delayed") {
      attributes.set("history", std::int64_t{1});
      inputs.push_back(value(name + ".state", {kScaleStateWords + 1}, Role::state));
    } else if (kind != "quantize") {
      inputs.push_back(value(name + ".given", {1}, Role::state));
    }
    if (inputs.size() > 1) joint.program[inputs[1]].dtype = DType::f32;
    const std::vector<ValueId> made = append(kind, inputs, name + ".codes", attributes);
    return {made[0], made.back()};
  }
  ValueId product(ValueId a, ValueId b, const std::string& name, Attributes attributes = {}) {
    attributes.set("transpose_a", std::int64_t{0});
    attributes.set("transpose_b", std::int64_t{1});
    return append("matmul", {a, b, kNoValue}, name, attributes)[0];
  }
  ValueId value(const std::string& name, Shape shape, Role role) {
    return joint.program.add_value({.name = name, .shape = std::move(shape), .dtype = DType::bf16, .role = role});
  }
  std::vector<ValueId> append(const std::string& kind, std::vector<ValueId> inputs, const std::string& name,
                              const Attributes& attributes = {}) {
    return append_op(joint.program, ops, DType::bf16,
                     {.kind = kind, .inputs = std::move(inputs), .outputs = {}, .attributes = attributes}, name);
  }

  Program read(const Accepts& accepts) const { return read_as_stored(joint, ops, {2, 8}, costs(accepts)).program; }

  OpSet ops = builtin_ops();
  JointProgram joint;
  ValueId dw = kNoValue;
};

/// The matmul of that name: its inputs and its flags.
std::string form(const Program& program, const std::string& name) {
  const Op& op = program.ops[static_cast<std::size_t>(program.producer(program.find(name)))];
  return program[op.inputs[0]].name + " " + program[op.inputs[1]].name + " " +
         std::to_string(op.attributes.integer("transpose_a")) + std::to_string(op.attributes.integer("transpose_b"));
}

bool transposes(const Program& program) { return program.find("w.t") != kNoValue; }

}  // namespace

TEST_CASE("where the device takes operands as stored, matmuls read no transposed copy, nor is one made of a weight") {
  for (const char* kind : {"quantize", "quantize_amax", "quantize_delayed", "quantize_by"}) {
    CAPTURE(kind);
    const Program got = Products(kind).read(any);
    CHECK(form(got, "dw") == "dy.codes x.codes 10");
    CHECK(form(got, "dx") == "dy.codes w 00");
    CHECK(form(got, "y") == "x.codes w 01");
    CHECK_FALSE(transposes(got));
    const std::vector<bool> read = read_values(got);
    for (const char* copy : {"x.codes.t", "dy.codes.t"}) CHECK_FALSE(read[static_cast<std::size_t>(got.find(copy))]);
  }
}

TEST_CASE("where it refuses, nothing changes") {
  const Products p;
  CHECK(to_string(p.read(none)) == to_string(p.joint.program));
}

TEST_CASE("of two copies that a matmul reads, where it takes one operand turned, the larger goes") {
  const Products p;
  CHECK(form(p.read(one), "dw") == "dy.codes x.codes.t 11");
  CHECK(form(p.read([](const OpInstance& op) { return one(op) && !turned_a(op); }), "dw") == "dy.codes.t x.codes 00");
}

TEST_CASE("a copy that anything else needs stays, and so does the matmul that reads it") {
  for (const bool handed_on : {false, true}) {
    Products p;
    Program& program = p.joint.program;
    const ValueId dy_t = program.find("dy.codes.t");
    const Attributes bf16{{"dtype", std::string("bf16")}};
    program.outputs.push_back(handed_on ? dy_t : p.append("cast", {dy_t}, "cast", bf16)[0]);
    CHECK(form(p.read(one), "dw") == "dy.codes.t x.codes 00");
  }

  Products two;  // that read w.t
  Program& program = two.joint.program;
  const ValueId dz = two.value("dz", {Dim::tokens(), 48}, Role::boundary);
  program[dz].dtype = DType::e5m2;
  program.inputs.push_back(dz);
  program.outputs.push_back(two.product(dz, program.find("w.t"), "dv"));
  const Program both = two.read(any);
  CHECK(form(both, "dv") == "dz w 00");
  CHECK_FALSE(transposes(both));
  const Program neither = two.read([](const OpInstance& op) { return op.inputs[0].dtype != DType::e5m2; });
  CHECK(form(neither, "dx") == "dy.codes w.t 01");
  CHECK(form(neither, "dv") == "dz w.t 01");
}

TEST_CASE("a copy stays where its original would be made for the matmul alone") {
  Products p;
  Program& program = p.joint.program;
  std::erase_if(program.ops, [&](const Op& op) { return op.outputs[0] == program.outputs[0]; });
  program.outputs = {p.joint.gradient_out};  // without y no op reads x.codes
  CHECK(form(p.read(any), "dw") == "dy.codes x.codes.t 11");
}

TEST_CASE("a copy stays where the matmuls lose more time without it than it takes") {
  const Products p;  // dy's copy is 768 bytes, which are written; w's the same, read and written
  auto with = [&](double lost) {
    auto seconds = [&](const Program& program) {  // a byte a second, and `lost` for a matmul with an operand as stored
      double sum = 0;
      const std::vector<bool> read = read_values(program);
      for (const Op& op : program.ops) {
        const OpInstance instance = instantiate(program, op, {2, 8}, read);
        const bool product = op.kind == "matmul";
        if (product && (turned_a(instance) || turned_b(instance))) sum += lost;
        if (!product) sum += cost_of(p.ops.at(op.kind), instance).bytes;
      }
      return sum;
    };
    const StoredCosts costs{.takes = any, .seconds = seconds};
    return read_as_stored(p.joint, p.ops, {2, 8}, costs).program;
  };
  CHECK(form(with(768), "dw") == "dy.codes x.codes 10");
  CHECK(form(with(769), "dw") == "dy.codes.t x.codes.t 01");
  CHECK(form(with(769), "dx") == "dy.codes w 00");
  CHECK(form(with(1537), "dx") == "dy.codes w.t 01");
}

TEST_CASE("block scales have one layout, but tile scales hold either way") {
  Products p;
  const Program as_stored = p.read(any);
  auto set = [&p](const char* attribute) {
    for (Op& op : p.joint.program.ops)
      if (op.kind == "matmul") op.attributes.set(attribute, std::int64_t{1});
  };
  set("scale_rows_b");
  CHECK(to_string(p.read(any)) == to_string(p.joint.program));
  set("square_scales");
  for (const char* name : {"dw", "dx"}) CHECK(form(p.read(any), name) == form(as_stored, name));
}

TEST_CASE("a matmul that accumulates is asked about writing and adding, at the plan's sizes, and taken with both") {
  const Products p;
  std::set<bool> asked;
  p.read([&](const OpInstance& op) {
    if (!turned_a(op)) return true;
    asked.insert(op.outputs[0].accumulate);
    CHECK(op.inputs[0] == Operand{DType::e4m3, {16, 48}, true});
    CHECK(op.outputs[0].extents == Extents{48, 16});
    return true;
  });
  CHECK(asked == std::set<bool>{false, true});
  for (const bool refused : {false, true})
    CHECK(form(p.read([&](const OpInstance& op) { return !turned_a(op) || op.outputs[0].accumulate != refused; }),
               "dw") == "dy.codes.t x.codes 00");
}

TEST_CASE("gradients that the program takes and hands on keep their places") {
  const Products p;
  const JointProgram got = read_as_stored(p.joint, p.ops, {2, 8}, costs(any));
  CHECK(got.program[got.gradient_in].name == "dy");
  CHECK(got.program[got.gradient_out].name == "dx");
}
