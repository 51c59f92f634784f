#include "conformance/device/device_ops.h"

#include <cmath>
#include <cstring>
#include <map>

#include "conformance/report.h"
#include "quern/step_state.h"
#include "quern/testkit/op_cases.h"
#include "quern/testkit/op_launch.h"
#include "quern/testkit/stochastic_rounding.h"
#include "quern/testkit/tensor_sums.h"

namespace quern::conformance {

namespace {

using testkit::integer_list;
using testkit::normal;
using testkit::OpComparison;
using testkit::PoisonedTensor;

/// Calls a function with each case.
class Visitor final : public testkit::OpRunner {
 public:
  explicit Visitor(std::function<void(const OpComparison&)> visit) : visit_(std::move(visit)) {}
  void run(const OpComparison& op) const override { visit_(op); }

 private:
  std::function<void(const OpComparison&)> visit_;
};

// ---- attention: the gradient reads its own device's statistics, whose layout is that device's business ----

struct AttentionCase {
  std::int64_t batch, sequence, heads, kv_heads, head_dim;
  const char* mask = "causal";
  std::vector<std::int32_t> documents = {};  ///< starts
  std::int64_t window = 0;
  double cap = 0;
};

const AttentionCase kAttention[] = {{1, 1, 1, 1, 2},
                                    {2, 5, 3, 1, 6},
                                    {1, 70, 4, 2, 34},
                                    {2, 64, 2, 2, 64},
                                    {1, 33, 1, 1, 128},
                                    {2, 40, 4, 2, 16, "full"},
                                    {2, 50, 4, 2, 64, "causal", {0, 3, 4, 50, 77}},
                                    {2, 50, 2, 1, 32, "full", {0, 20, 50, 99}},
                                    {1, 40, 3, 1, 16, "causal", {}, 1},
                                    {2, 70, 4, 2, 64, "causal", {}, 7},
                                    {2, 50, 4, 2, 64, "causal", {0, 3, 4, 50, 77}, 9},
                                    {1, 33, 2, 2, 32, "causal", {}, 34},
                                    {2, 50, 3, 3, 16, "causal", {}, 0, 0.5},
                                    {2, 50, 4, 2, 64, "causal", {0, 20, 50, 99}, 11, 0.5}};

struct AttentionOps {
  const AttentionCase& c;
  DType dtype;
  std::int64_t tokens() const { return c.batch * c.sequence; }
  Extents packed() const { return {tokens(), (c.heads + 2 * c.kv_heads) * c.head_dim}; }
  Extents width() const { return {tokens(), c.heads * c.head_dim}; }
  Attributes attributes() const {
    Attributes list{{"heads", c.heads},
                    {"kv_heads", c.kv_heads},
                    {"head_dim", c.head_dim},
                    {"mask", std::string(c.mask)},
                    {"scale", 1 / std::sqrt(static_cast<double>(c.head_dim))}};
    if (c.window > 0) list.set("window", c.window);
    if (c.cap > 0) list.set("cap", c.cap);
    return list;
  }
  void add_documents(OpComparison& op) const {
    if (c.documents.empty()) return void(op.absent());
    std::vector<std::int32_t> starts = c.documents;
    starts.resize(static_cast<std::size_t>(tokens()) + 1, static_cast<std::int32_t>(tokens()));
    op.in(integer_list(starts));
  }
  // Tensor cores take probabilities and score gradients as bf16, 2^-9 of each; gradients sum hundreds of these.
  OpComparison forward() const {
    OpComparison op("attention", attributes(), {c.batch, c.sequence});
    op.in(normal(dtype, packed(), 1));
    add_documents(op);
    op.out(dtype, width(), dtype == DType::bf16 ? testkit::Tolerance{0x1p-6, 0.02} : testkit::Tolerance{1e-5, 1e-5});
    op.opaque(DType::f32, {tokens(), c.heads});
    return op;
  }
  OpComparison gradient(const OpComparison::Results& made) const {
    OpComparison op("attention_grad", attributes(), {c.batch, c.sequence});
    op.in(normal(dtype, width(), 2)).in(normal(dtype, packed(), 1)).in(made[0]).in(made[1]);
    add_documents(op);
    op.out(dtype, packed(), {});
    return op;
  }
};

void each_attention(const std::function<void(const AttentionOps&)>& visit) {
  for (const AttentionCase& c : kAttention)
    for (DType dtype : {DType::f32, DType::bf16}) visit({c, dtype});
}

void attention_cases(const testkit::OpRunner& runner) {
  each_attention([&](const AttentionOps& ops) {
    ops.forward().run(runner);
    ops.gradient({PoisonedTensor(ops.dtype, ops.width()), PoisonedTensor(DType::f32, {ops.tokens(), ops.c.heads})})
        .run(runner);
  });
}

void need_none(const OpComparison& op, const std::vector<std::string>& faults) {
  if (!faults.empty())
    broken(op.label(), faults[0] + (faults.size() > 1 ? "; and " + std::to_string(faults.size() - 1) + " more" : ""),
           "the reference's result, the same bits each time, and nothing else written");
}

std::string compare_attention(Device& oracle, Device& device) {
  int compared = 0, refused = 0;
  std::string reason;
  each_attention([&](const AttentionOps& ops) {
    OpComparison forward = ops.forward();
    if (std::string refusal = device.query(forward.instance()).refusal; !refusal.empty()) {
      ++refused, reason = refusal;
      return;
    }
    need_none(forward, forward.faults(oracle, device));
    std::vector<std::string> faults, unused;
    using How = OpComparison::How;
    OpComparison want = ops.gradient(forward.run_on(oracle, How::eager, unused));
    OpComparison got = ops.gradient(forward.run_on(device, How::eager, unused));
    if (std::string refusal = device.query(got.instance()).refusal; !refusal.empty())
      broken(got.label(), "refused: " + refusal, "accepted, as attention is");
    const OpComparison::Results expected = want.run_on(oracle, How::eager, unused),
                                found = got.run_on(device, How::eager, faults),
                                again = got.run_on(device, How::eager, faults);
    const bool low = ops.dtype == DType::bf16;
    std::string differs =
        testkit::mismatch(found[0].floats(), expected[0].floats(), low ? 0x1p-5 : 1e-4, low ? 0.05 : 5e-5);
    if (!differs.empty()) faults.push_back("output 0: " + differs);
    if (std::memcmp(found[0].view().data, again[0].view().data, found[0].view().bytes()) != 0)
      faults.push_back("output 0: a second run gives other bits");
    need_none(got, faults);
    compared += 2;
  });
  return std::to_string(compared) + " cases" + (refused ? ", " + std::to_string(refused) + " refused: " + reason : "");
}

// ---- delayed scales: values and state over launches that fit, clip, and advance ----

constexpr std::int64_t kHistory = 3;

OpInstance delayed_op(const Extents& size) {
  const Attributes attributes{{"format", std::string("e4m3")}, {"margin", std::int64_t{1}}, {"history", kHistory}};
  return {"quantize_delayed",
          {{DType::bf16, size, true, false}, {DType::f32, {kScaleStateWords + kHistory}, true, false}},
          {{DType::e4m3, size, true, false},
           {DType::f32, {1}, true, false},
           {DType::e4m3, {size[1], size[0]}, true, false}},
          attributes,
          {}};
}

std::string compare_delayed(Device& oracle, Device& device) {
  int launches = 0;
  for (const Extents& size : {Extents{33, 70}, Extents{272, 144}, Extents{1, 1}}) {
    const OpInstance op = delayed_op(size);
    if (std::string refusal = device.query(op).refusal; !refusal.empty()) return "refused: " + refusal;
    const OpInstance advance{"advance_scale", {op.inputs[1]}, {op.inputs[1]}, op.attributes, {}};
    PoisonedTensor want_state(DType::f32, {kScaleStateWords + kHistory}), got_state = want_state;
    for (PoisonedTensor* state : {&want_state, &got_state}) std::memset(state->view().data, 0, state->view().bytes());
    int round = 0;
    for (double deviation : {0.0, 1.0, 1.0, 40.0, 2.0, 1.0, 500.0, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3}) {
      const std::string where = "quantize_delayed of " + to_string(size) + ", launch " + std::to_string(round);
      PoisonedTensor x = normal(DType::bf16, size, 7 + static_cast<std::uint64_t>(round), deviation);
      auto want = testkit::launch_once(oracle, op, {x.view(), want_state.view()});
      auto got = testkit::launch_once(device, op, {x.view(), got_state.view()});
      const char* names[] = {"quantized", "scale", "transposed", "x", "state"};
      for (std::size_t i = 0; i < 5; ++i)
        if (std::memcmp(got[i].view().data, want[i].view().data, want[i].view().bytes()) != 0)
          broken(where + ": " + names[i], testkit::mismatch(got[i].floats(), want[i].floats(), 0), "the oracle's bits");
      want_state = want[4], got_state = got[4];
      const OpInstance observe{"observe_scale",
                               {},
                               {{DType::u32, {kScaleObservationWords}, true, true}},
                               {{"format", std::string("e4m3")}, {"layout", std::string("tensor")}},
                               {}};
      auto want_seen = testkit::launch_once(oracle, observe, {x.view(), want[1].view(), want_state.view()});
      auto got_seen = testkit::launch_once(device, observe, {x.view(), got[1].view(), got_state.view()});
      need(std::memcmp(got_seen[0].view().data, want_seen[0].view().data, sizeof(ScaleObservation)) == 0,
           "observe_scale after " + where, "other figures", "the reference's bits, added to the previous contents");
      if (round++ % 2 == 1) {
        want_state = testkit::launch_once(oracle, advance, {want_state.view()}, {{0, 0}})[0];
        got_state = testkit::launch_once(device, advance, {got_state.view()}, {{0, 0}})[0];
        if (std::memcmp(got_state.view().data, want_state.view().data, want_state.view().bytes()) != 0)
          broken("advance_scale after " + where, testkit::mismatch(got_state.floats(), want_state.floats(), 0),
                 "the oracle's bits");
      }
      ++launches;
    }
  }
  return std::to_string(launches) + " launches";
}

void delayed_cases(const testkit::OpRunner& runner) {
  const OpInstance op = delayed_op({33, 70});
  OpComparison comparison(op.kind, op.attributes);
  for (const Operand& operand : op.inputs) comparison.in(PoisonedTensor(operand.dtype, operand.extents));
  for (const Operand& operand : op.outputs) comparison.out(operand.dtype, operand.extents, {});
  comparison.run(runner);
  OpComparison advance("advance_scale", op.attributes);
  advance.in(PoisonedTensor(op.inputs[1].dtype, op.inputs[1].extents)).update(0, {});
  advance.run(runner);
}

std::string compare_rounding(Device& oracle, Device& device) {
  if (std::string refusal = device.query(testkit::rounded_update()).refusal; !refusal.empty())
    return "refused: " + refusal;
  const std::string fault = testkit::stochastic_rounding_fault(oracle, device);
  need(fault.empty(), "stochastic rounding of adamw", fault, "an independent draw for every element");
  return "2 steps, 2 objects";
}

std::string compare_grouping(Device&, Device& device) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    if (std::string refusal = device.query(testkit::sum_of_one_tensor(dtype)).refusal; !refusal.empty())
      return "refused: " + refusal;
    const std::string fault = testkit::tensor_sums_fault(device, dtype, device.traits().alignment);
    need(fault.empty(), "sum_squares", fault, "sums that depend only on their own tensor");
  }
  return "1000 tensors";
}

}  // namespace

const std::vector<OpFamily>& op_families() {
  static const std::vector<OpFamily> families = {
      {"matmul", testkit::matmul_cases},
      {"matmul with bias", testkit::matmul_bias_cases},
      {"matmul of 8 bits", testkit::matmul_8bit_cases},
      {"matmul of 8 bits, forms", testkit::matmul_8bit_form_cases},
      {"transpose, cast", testkit::conversion_cases},
      {"cast of bytes", testkit::scaled_cast_cases},
      {"embedding", testkit::embedding_cases},
      {"tokens and rows", testkit::token_rows_cases},
      {"class_loss", testkit::class_loss_cases},
      {"rms_norm", testkit::rms_norm_cases},
      {"layer_norm", testkit::layer_norm_cases},
      {"rope, head_norm", testkit::head_cases},
      {"attention", attention_cases, compare_attention},
      {"add, swiglu, gelu, sums", testkit::elementwise_cases},
      {"reduce_ranks", testkit::reduce_ranks_cases},
      {"sum_tree", testkit::sum_tree_cases},
      {"lm_loss", [](const testkit::OpRunner& runner) { testkit::loss_cases(runner, testkit::kLossShapes); }},
      {"soft caps of logits",
       [](const testkit::OpRunner& runner) { testkit::capped_logits_cases(runner, testkit::kLossShapes); }},
      {"loss_stats", testkit::loss_stats_cases},
      {"loss_stats_grad", testkit::loss_stats_grad_cases},
      {"sum_squares, clip_scale", testkit::norm_and_clip_cases},
      {"sum_squares, its grouping", [](const testkit::OpRunner&) {}, compare_grouping},
      {"adamw", testkit::adamw_cases},
      {"adamw of many tensors", testkit::adamw_list_cases},
      {"adamw_8bit", testkit::adamw_8bit_cases},
      {"sgd, lion, schedule_free", testkit::optimizer_cases},
      {"stacked_matmul", testkit::stacked_matmul_cases},
      {"muon", testkit::muon_cases},
      {"adamw, its rounding", [](const testkit::OpRunner&) {}, compare_rounding},
      {"quantize", testkit::quantize_cases},
      {"amax", testkit::amax_cases},
      {"quantize by blocks", testkit::quantize_blocks_cases},
      {"quantize zeros, inf, NaN", testkit::quantize_special_cases},
      {"quantize_delayed", delayed_cases, compare_delayed},
      {"quantize_weights and back", testkit::weight_format_cases},
      {"observe_scale", testkit::observe_scale_cases}};
  return families;
}

std::map<std::string, std::string> refused_ops(const Device& device) {
  std::map<std::string, std::string> reasons;
  const Visitor visitor([&](const OpComparison& op) {
    if (std::string reason = device.query(op.instance()).refusal; !reason.empty())
      reasons.try_emplace(op.instance().kind, std::move(reason));
  });
  for (const OpFamily& family : op_families()) family.cases(visitor);
  return reasons;
}

std::string plans_ops(const Device& device) {
  std::map<std::string, std::pair<int, int>> kinds;  // accepted, refused
  std::string reason;
  const Visitor visitor([&](const OpComparison& op) {
    const OpSupport support = device.query(op.instance());
    const bool first = !kinds.contains(op.instance().kind);
    auto& [accepted, refused] = kinds[op.instance().kind];
    OpInstance bare = op.instance();
    bare.inputs.clear();
    bare.outputs.clear();
    need(!first || !device.query(bare).refusal.empty(), bare.kind + " without operands", "accepted",
         "refused when planning, with a reason");
    (support.refusal.empty() ? accepted : refused) += 1;
    if (!support.refusal.empty() && reason.empty()) reason = support.refusal;
  });
  for (const OpFamily& family : op_families()) family.cases(visitor);
  int whole = 0, partly = 0, none = 0;
  for (const auto& [kind, counts] : kinds) (counts.second == 0 ? whole : counts.first > 0 ? partly : none) += 1;
  need(whole + partly > 0, "ops of the vocabulary that it runs", "none", "some");
  return std::to_string(kinds.size()) + " kinds: " + std::to_string(whole) + " accepted, " + std::to_string(partly) +
         " in part, " + std::to_string(none) + " refused" + (reason.empty() ? "" : " (" + reason + ")");
}

std::string compare_family(const OpFamily& family, Device& oracle, Device& device) {
  if (family.compare) return family.compare(oracle, device);
  int compared = 0, refused = 0;
  std::string reason;
  family.cases(Visitor([&](const OpComparison& op) {
    const OpSupport support = device.query(op.instance());
    if (!support.refusal.empty()) {
      ++refused, reason = support.refusal;
      return;
    }
    // A fused form that the oracle does not know is compared through models.
    if (!oracle.query(op.instance()).refusal.empty()) return;
    need_none(op, op.faults(oracle, device));
    ++compared;
  }));
  return std::to_string(compared) + " cases" + (refused ? ", " + std::to_string(refused) + " refused: " + reason : "");
}

}  // namespace quern::conformance
