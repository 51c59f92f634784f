// Muon: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the step sizes of Liu et
// al., "Muon is Scalable for LLM Training" (2025), and the rows of Li et al., "NorMuon" (2025). Matrices of the layers
// step along the orthogonal matrix nearest to their momentum, each tensor of a packed matrix by itself, or each of its
// attention heads; all else takes AdamW.
#include <algorithm>
#include <cmath>

#include "optimizer/adamw.h"
#include "optimizer/optimizers.h"
#include "quern/error.h"
#include "quern/options.h"

namespace quern {

namespace {

/// AdamW's are of all else; its weight decay and moments are Muon's too.
struct MuonOptions : AdamWOptions {
  double momentum = 0.95;
  bool nesterov = true;
  std::int64_t iterations = 5;
  std::string matmuls = "bf16";
  std::string step_size = "match_rms_adamw";
  std::string normalize = "none";
  double row_beta = 0.95;
  std::string split = "tensors";
};

OptionTable<MuonOptions> muon_options() {
  OptionTable<MuonOptions> t;
  t.add("momentum", &MuonOptions::momentum, "decay of the average of gradients").at_least(0).at_most(0.9999999);
  t.add("nesterov", &MuonOptions::nesterov, "averages the new average with the gradient once more");
  t.add("iterations", &MuonOptions::iterations, "of Newton-Schulz").at_least(1).at_most(20);
  t.add("matmuls", &MuonOptions::matmuls, "format of its matmuls").one_of({"bf16", "fp32"});
  t.add("step_size", &MuonOptions::step_size,
        "match_rms_adamw: 0.2 sqrt(max(rows, columns)), as large as AdamW's steps, so that the rate is AdamW's; "
        "original: sqrt(max(1, rows / columns))")
      .one_of({"match_rms_adamw", "original"});
  t.add("normalize", &MuonOptions::normalize,
        "rows: each row of a step over the root of its average square, and the step as long as before (NorMuon)")
      .one_of({"none", "rows"});
  t.add("row_beta", &MuonOptions::row_beta, "decay of the average of rows' squares").at_least(0).at_most(0.9999999);
  t.add("split", &MuonOptions::split,
        "the matrices to orthogonalize, each alone: tensors; of queries, keys and values, head_groups: heads that "
        "share a key and value head together; heads: each head")
      .one_of({"tensors", "head_groups", "heads"});
  t.add("moments", &AdamWOptions::moments, "dtype of the average and of AdamW's moments; bf16 rounds stochastically")
      .one_of({"fp32", "bf16"});
  add_adamw_rule(t);
  return t;
}

/// Newton-Schulz's coefficients, of a quintic that takes singular values to about 1.
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

class Muon final : public Optimizer {
 public:
  explicit Muon(MuonOptions options) : options_(std::move(options)), adamw_(options_) {}

  void check(std::span<const ParameterSpec> parameters) const override {
    if (options_.split == "tensors" || std::any_of(parameters.begin(), parameters.end(), has_heads)) return;
    throw Error(ErrorCode::config, {.where = "optimizer.muon.split",
                                    .what = "of the matrices that it updates none are queries, keys or values of heads",
                                    .found = "\"" + options_.split + "\"",
                                    .expected = "\"tensors\"",
                                    .next = "a model states its heads by ParameterPart::heads"});
  }

  std::vector<OptimizerState> states(const ParameterSpec& parameter) const override {
    std::vector<OptimizerState> states = adamw_.states(parameter);
    if (!orthogonal(parameter)) return states;
    states.resize(1);
    if (options_.normalize == "rows") states.push_back(OptimizerState::rows(parameter, "moment2", DType::f32));
    return states;
  }

  void update(UpdateBuilder& b, const ParameterSpec& parameter) const override {
    if (!orthogonal(parameter)) return adamw_.update(b, parameter);
    std::int64_t first = 0;
    for (const std::int64_t rows : matrices(parameter)) {
      update_rows(b, parameter, first, rows);
      first += rows;
    }
  }

 private:
  static bool orthogonal(const ParameterSpec& parameter) {
    return parameter.group == ParameterGroup::block && parameter.extents.size() == 2;
  }

  static bool has_heads(const ParameterSpec& parameter) {
    return orthogonal(parameter) && std::any_of(parameter.parts.begin(), parameter.parts.end(),
                                                [](const ParameterPart& part) { return !part.heads.empty(); });
  }

  /// Rows of each matrix that is orthogonalized, in order.
  std::vector<std::int64_t> matrices(const ParameterSpec& parameter) const {
    std::vector<std::int64_t> rows;
    for (const ParameterPart& part : parameter.parts) {
      if (options_.split == "tensors" || part.heads.empty()) {
        rows.push_back(part.rows);
        continue;
      }
      for (const HeadRows& run : part.heads) {
        const std::int64_t together = options_.split == "heads" ? 1 : run.group;
        rows.insert(rows.end(), static_cast<std::size_t>(run.heads / together), run.rows * together);
      }
    }
    return rows;
  }

  void update_rows(UpdateBuilder& b, const ParameterSpec& parameter, std::int64_t first, std::int64_t rows) const {
    const std::int64_t columns = parameter.extents[1];
    const ValueId direction =
        b.op("muon_direction", {b.update(), b.step(), b.gradient(), b.state("moment1")}, "direction",
             {{"momentum", options_.momentum},
              {"nesterov", std::int64_t{options_.nesterov}},
              {"dtype", options_.matmuls},
              {"first", first},
              {"rows", rows}})[1];
    const double size = options_.step_size == "original"
                            ? std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(columns)))
                            : 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns)));
    std::vector<ValueId> operands{b.update(), b.step(), b.master(), orthogonalized(b, direction, rows > columns)};
    if (options_.normalize == "rows")
      operands.push_back(
          b.op("row_factors", {b.update(), b.step(), b.state("moment2"), operands[3]}, "factors",
               {{"beta", options_.row_beta}, {"index", std::int64_t{0}}, {"first", first}, {"rows", rows}})[1]);
    b.op("muon_apply", std::move(operands), "",
         {{"weight_decay", parameter.decay ? options_.weight_decay : 0.0},
          {"rate", parameter.rate},
          {"factor", size},
          {"index", std::int64_t{0}},
          {"first", first},
          {"rows", rows}});
  }

  // A stack of one; the core joins stacks of equal matrices. x = a x + (b x x^T + c (x x^T)^2) x, on the smaller side.
  ValueId orthogonalized(UpdateBuilder& b, ValueId direction, bool tall) const {
    auto matmul = [&](ValueId left, ValueId right, ValueId added, bool transpose_a, bool transpose_b, double alpha,
                      double beta) {
      return b.op("stacked_matmul", {left, right, added}, "product",
                  {{"transpose_a", std::int64_t{transpose_a}},
                   {"transpose_b", std::int64_t{transpose_b}},
                   {"alpha", alpha},
                   {"beta", beta}})[0];
    };
    const ValueId square = b.op("sum_squares", {direction}, "square")[0];
    ValueId x = b.op("over_norm", {square, direction}, "orthogonal")[0];
    for (std::int64_t i = 0; i < options_.iterations; ++i) {
      const ValueId gram = matmul(x, x, kNoValue, tall, !tall, 1, 0);
      const ValueId factor = matmul(gram, gram, gram, false, false, kC, kB);
      x = tall ? matmul(x, factor, x, false, false, 1, kA) : matmul(factor, x, x, false, false, 1, kA);
    }
    return x;
  }

  MuonOptions options_;
  AdamW adamw_;
};

}  // namespace

void add_muon(Manifest& manifest) {
  manifest.add<Optimizer>(
      "muon", "Muon for matrices of the layers, AdamW for all else", muon_options().specs(),
      [](const OptionValues& values) { return std::make_unique<Muon>(muon_options().bind(values)); });
}

}  // namespace quern
