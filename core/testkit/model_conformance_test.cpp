// The check must find what is wrong: a model with one fault at a time.
#include "quern/testkit/model_conformance.h"

#include <algorithm>

#include <doctest/doctest.h>

using namespace quern;

namespace {

enum class Fault {
  none,
  unused,
  wrong_group,
  wrong_width,
  layer_in_head,
  rows,
  twice,
  twice_in_layer,
  nameless,
  undeclared,
  kinds,
  row_order,
  heads,
  head_groups,
  dtypes
};

class Faulty final : public Model {
 public:
  explicit Faulty(Fault fault) : fault_(fault) {}
  ModelTraits traits() const override { return {.layers = 3, .width = 8, .vocabulary = 11, .max_positions = 16}; }
  std::vector<ParameterSpec> parameters() const override {
    using enum ParameterGroup;
    std::vector<ParameterSpec> list = {
        matrix("embedding.weight", embedding, "wte", 11, 8),
        matrix("w", fault_ == Fault::wrong_group ? head : block, fault_ == Fault::wrong_group ? "w" : "h.{layer}.w", 8,
               8),
        vector("norm", head, fault_ == Fault::layer_in_head ? "h.{layer}.norm" : "norm", 8, Init::Kind::ones)};
    if (fault_ == Fault::unused) list.push_back(matrix("spare", block, "h.{layer}.spare", 8, 8));
    if (fault_ == Fault::rows) list[1].parts[0].rows = 7;
    if (fault_ == Fault::row_order) list[1].parts[0].row_order = {0, 2, 2, 1};
    if (fault_ == Fault::heads) list[1].parts[0].heads = {{3, 2, 1}};
    if (fault_ == Fault::head_groups) list[1].parts[0].heads = {{4, 2, 3}};
    if (fault_ == Fault::twice) list[2].parts[0].hf_name = "wte";
    if (fault_ == Fault::twice_in_layer) list[2].parts[0].hf_name = "h.1.w";
    if (fault_ == Fault::nameless) list[2].parts[0].hf_name = "";
    return list;
  }
  void embed(ProgramBuilder& b) const override { b.output(b.embedding(b.tokens(), "embedding.weight")); }
  void block(ProgramBuilder& b, std::int64_t layer) const override {
    ValueId x = b.stream(fault_ == Fault::wrong_width ? 16 : 8);
    if (fault_ == Fault::kinds && layer == 2) x = b.scale(x, 2, "scaled");
    if (fault_ == Fault::dtypes) x = b.op("cast", {x}, "wide", {{"dtype", std::string("f32")}})[0];
    b.output(fault_ == Fault::wrong_width ? b.swiglu(x, "half")
                                          : b.add(x, b.linear(x, fault_ == Fault::undeclared ? "v" : "w", "y"), "sum"));
  }
  void head(ProgramBuilder& b) const override {
    b.output(b.lm_loss(b.rms_norm(b.stream(8), "norm", 1e-6, "normed"), "embedding.weight"));
  }
  std::string hf_config() const override { return "{}"; }

 private:
  Fault fault_;
};

bool finds(Fault fault, const std::string& text) {
  const std::vector<std::string> faults = testkit::model_faults(Faulty(fault));
  return std::any_of(faults.begin(), faults.end(),
                     [&](const std::string& found) { return found.find(text) != std::string::npos; });
}

}  // namespace

TEST_CASE("a sound model has no faults") {
  CHECK(testkit::model_faults(Faulty(Fault::none)).empty());
  CHECK(testkit::parameter_count(Faulty(Fault::none)) == 11 * 8 + 3 * 8 * 8 + 8);
  CHECK(testkit::model_programs(Faulty(Fault::none)).find("lm_loss") != std::string::npos);
}

TEST_CASE("each fault is found and named") {
  CHECK(finds(Fault::unused, "spare: no program uses it"));
  CHECK(finds(Fault::wrong_group, "uses w, which is of another group"));
  CHECK(finds(Fault::wrong_width, "block: takes (N, 16), expected (N, 8)"));
  CHECK(finds(Fault::layer_in_head, "norm: {layer} belongs"));
  CHECK(finds(Fault::rows, "w: rows of its parts do not sum up to (8, 8)"));
  CHECK(finds(Fault::twice, "Hugging Face name used twice: wte"));
  CHECK(finds(Fault::twice_in_layer, "norm: Hugging Face name used twice: h.1.w"));
  CHECK(finds(Fault::nameless, "norm: a part without a Hugging Face name"));
  CHECK(finds(Fault::kinds, "block: layer 2 differs from an earlier one of the same block_kind, 0"));
  CHECK(finds(Fault::row_order, "row_order of h.{layer}.w is no order"));
  CHECK(finds(Fault::heads, "heads of h.{layer}.w do not have the part's rows"));
  CHECK(finds(Fault::head_groups, "heads of h.{layer}.w are not whole groups of at least one head"));
  CHECK(finds(Fault::dtypes, "block: operand wide of linear is f32, expected bf16"));
  CHECK(finds(Fault::dtypes, "block: its output sum is f32, expected bf16"));
  CHECK(finds(Fault::undeclared, "uses a parameter that the model does not declare"));
}
