// The ops that quantize to 8 bits: alone to the bit of the CPU device, states of delayed scales over several launches
// included; behind a producer to the bit of the two ops apart.
#include <cmath>
#include <cstring>
#include <limits>

#include "quern/block_scales.h"
#include "quern/numeric.h"
#include "quern/quantized_format.h"
#include "quern/step_state.h"
#include "quern/testkit/op_cases.h"
#include "quern/testkit/op_launch.h"
#include "tests/device_pair.h"

using namespace quern;
using namespace quern::cuda;
using testkit::PoisonedTensor;

namespace {

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32, kE4m3 = DType::e4m3, kE5m2 = DType::e5m2;
using Tensors = std::vector<PoisonedTensor>;

Attributes format_of(DType format) { return {{"format", std::string(name_of(format))}}; }
Extents turned(const Extents& size) { return {size[1], size[0]}; }

using testkit::launch_once;

bool same_bits(const PoisonedTensor& a, const PoisonedTensor& b) {
  return a.view().bytes() == b.view().bytes() && std::memcmp(a.view().data, b.view().data, a.view().bytes()) == 0;
}

Operand operand(DType dtype, Extents extents, bool present = true) {
  return {dtype, std::move(extents), present, false};
}

constexpr const char* kBlockWays[] = {"quantize_blocks", "quantize_squares"};
bool of_blocks(const std::string& way) { return way == "quantize_blocks" || way == "quantize_squares"; }

/// The outputs of a way to quantize a tensor of that size.
std::vector<Operand> codes(DType format, const Extents& size, const std::string& way = "quantize") {
  const Operand q = operand(format, size), t = operand(format, turned(size));
  if (way == "quantize_by") return {q, t};
  if (of_blocks(way))
    return {q, operand(kF32, row_block_scales(size[0], size[1])), t,
            operand(kF32, column_block_scales(size[0], size[1]))};
  return {q, operand(kF32, {1}), t};
}

PoisonedTensor zero_state(std::int64_t history) {
  PoisonedTensor state(kF32, {kScaleStateWords + history});
  std::memset(state.view().data, 0, state.view().bytes());
  return state;
}

}  // namespace

TEST_CASE("bytes become numbers by a factor and a summand of each channel, to the bit") {
  testkit::scaled_cast_cases(open_pair());
}

TEST_CASE("quantize, by tensor, given scale, rows and columns, gives the CPU's bits") {
  testkit::quantize_cases(open_pair());
}

TEST_CASE("weights in the formats of quern/weight_format.h have the CPU's bits") {
  testkit::weight_format_cases(open_pair());
}

TEST_CASE("amax gives the CPU's bits") { testkit::amax_cases(open_pair()); }

TEST_CASE("quantize_blocks and quantize_squares give the CPU's bits") { testkit::quantize_blocks_cases(open_pair()); }

TEST_CASE("observe_scale gives the CPU's figures under every layout of scales") {
  testkit::observe_scale_cases(open_pair());
}

TEST_CASE("zeros, infinities and NaN are quantized as on the CPU") { testkit::quantize_special_cases(open_pair()); }

TEST_CASE("delayed scales: values, state and observation are the CPU's over launches that fit, clip and advance") {
  DevicePair pair = open_pair();
  constexpr std::int64_t kHistory = 3;
  Attributes attributes = format_of(kE4m3), layout = format_of(kE4m3);
  attributes.set("margin", std::int64_t{1});
  attributes.set("history", kHistory);
  layout.set("layout", std::string("tensor"));
  const Operand state = operand(kF32, {kScaleStateWords + kHistory});
  const OpInstance advance{"advance_scale", {state}, {state}, attributes, {}};
  const OpInstance observe{"observe_scale", {}, {{DType::u32, {kScaleObservationWords}, true, true}}, layout, {}};
  CHECK(pair.gpu->query(advance).refusal == "");
  for (const Extents& size : {Extents{33, 70}, Extents{272, 144}, Extents{4096, 384}}) {
    const OpInstance quantize{"quantize_delayed", {}, codes(kE4m3, size), attributes, {}};
    OpInstance planned = quantize;
    planned.inputs = {operand(kBf16, size), state};
    CHECK(pair.gpu->query(planned).refusal == "");
    if (!pair.open || !affordable(element_count(size))) continue;
    PoisonedTensor cpu_state = zero_state(kHistory), gpu_state = zero_state(kHistory);
    int round = 0;
    for (double deviation : {0.0, 1.0, 1.0, 40.0, 2.0, -1.0, 1.0, 500.0, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3}) {
      CAPTURE(to_string(size));
      CAPTURE(round);
      PoisonedTensor x = normal(kBf16, size, 7 + static_cast<std::uint64_t>(round), std::fabs(deviation));
      if (deviation < 0) x.view().as<std::uint16_t>()[5] = float_to_bf16(std::numeric_limits<float>::infinity());
      Tensors want = launch_once(*pair.cpu, quantize, {x.view(), cpu_state.view()});
      Tensors got = launch_once(*pair.gpu, quantize, {x.view(), gpu_state.view()});
      for (std::size_t i : {0, 2}) CHECK(same_bits(got[i], want[i]));
      CHECK(testkit::mismatch(got[1].floats(), want[1].floats(), 0) == "");  // the scale may be NaN
      CHECK(same_bits(got[4], want[4]));
      cpu_state = want[4], gpu_state = got[4];
      CHECK(same_bits(launch_once(*pair.gpu, observe, {x.view(), got[1].view(), gpu_state.view()})[0],
                      launch_once(*pair.cpu, observe, {x.view(), want[1].view(), cpu_state.view()})[0]));
      if (round++ % 2 == 1) {
        auto advanced = [&](Device& device, PoisonedTensor& state) {
          state = launch_once(device, advance, {state.view()}, {{0, 0}})[0];
        };
        advanced(*pair.cpu, cpu_state);
        advanced(*pair.gpu, gpu_state);
        CHECK(same_bits(gpu_state, cpu_state));
      }
    }
  }
}

namespace {

/// A producer with operands, whose output `result` is quantized.
struct Producer {
  std::string kind;
  std::vector<PoisonedTensor> inputs;
  std::vector<Operand> outputs;
  std::size_t result;
  Attributes attributes = {};
  Geometry geometry = {};
};

std::vector<View> views_of(const Tensors& tensors) {
  std::vector<View> views;
  for (const PoisonedTensor& tensor : tensors) views.push_back(tensor.view());
  return views;
}

/// "<producer>_<way>" gives the bits of the two ops apart, whether or not the result itself is read.
/// Without a GPU: the plan accepts the fused op.
void compare_fused(const DevicePair& pair, const Producer& producer, const std::string& way, const Tensors& more,
                   DType format = kE4m3) {
  Device& gpu = *pair.gpu;
  CAPTURE(std::string(name_of(format)));
  Attributes attributes = format_of(format);
  if (way == "quantize_delayed") attributes.set("history", std::int64_t{2}), attributes.set("margin", std::int64_t{0});
  OpInstance second{way, {}, codes(format, producer.outputs[producer.result].extents, way), attributes, {}};
  if (!pair.open) {
    OpInstance planned{producer.kind + "_" + way, {}, producer.outputs, producer.attributes, producer.geometry};
    for (const Tensors* tensors : {&producer.inputs, &more})
      for (const PoisonedTensor& tensor : *tensors)
        planned.inputs.push_back(operand(tensor.view().dtype, tensor.view().extents));
    planned.outputs.insert(planned.outputs.end(), second.outputs.begin(), second.outputs.end());
    for (const auto& [name, value] : attributes.all()) planned.attributes.set(name, value);
    CHECK(gpu.query(planned).refusal == "");
    return;
  }
  if (!affordable(element_count(producer.outputs[producer.result].extents))) return;
  OpInstance apart{producer.kind, {}, producer.outputs, producer.attributes, producer.geometry};
  Tensors made = launch_once(gpu, apart, views_of(producer.inputs));
  const PoisonedTensor& result = made[producer.result];
  Tensors operands{result};
  for (const PoisonedTensor& tensor : more) operands.push_back(tensor);
  Tensors want = launch_once(gpu, second, views_of(operands));
  std::vector<std::vector<std::size_t>> nobody_reads{{}, {0}, {second.outputs.size() - 1}};
  if (of_blocks(way)) nobody_reads = {{}, {0}, {2}, {3}, {0, 1}, {2, 3}};
  for (bool read : {true, false}) {
    for (const std::vector<std::size_t>& unread : nobody_reads) {
      OpInstance fused{producer.kind + "_" + way, {}, producer.outputs, producer.attributes, producer.geometry};
      fused.outputs[producer.result].present = read;
      fused.outputs.insert(fused.outputs.end(), second.outputs.begin(), second.outputs.end());
      for (std::size_t i : unread) fused.outputs[producer.outputs.size() + i].present = false;
      for (const auto& [name, value] : attributes.all()) fused.attributes.set(name, value);
      Tensors inputs = producer.inputs;
      for (const PoisonedTensor& tensor : more) inputs.push_back(tensor);
      Tensors got = launch_once(gpu, fused, views_of(inputs));
      CAPTURE(fused.kind);
      CAPTURE(read);
      CAPTURE(unread.empty() ? "all read" : "not read: " + std::to_string(unread.front()));
      for (std::size_t i = 0; i < fused.outputs.size(); ++i) {
        CAPTURE(i);
        const std::size_t made_here = producer.outputs.size();
        if (fused.outputs[i].present) CHECK(same_bits(got[i], i < made_here ? made[i] : want[i - made_here]));
      }
      if (way == "quantize_delayed") CHECK(same_bits(got.back(), want.back()));
    }
  }
}

std::vector<Producer> producers(const Extents& size) {
  const Extents packed{size[0], 2 * size[1]}, w{size[1]}, rows{size[0]};
  const Operand value = operand(kBf16, size), stats = operand(kF32, rows), sum = operand(kF32, w);
  const Attributes eps{{"eps", 1e-6}};
  auto x = [&](std::uint64_t seed) { return normal(kBf16, size, seed); };
  auto weight = [&] { return normal(kBf16, w, 9, 0.1, 1); };
  std::vector<Producer> all;
  all.push_back({"swiglu", {normal(kBf16, packed, 1, 2)}, {value}, 0});
  all.push_back({"swiglu_grad", {x(2), normal(kBf16, packed, 1, 2)}, {operand(kBf16, packed)}, 0});
  all.push_back({"rms_norm", {x(1), weight()}, {value, stats}, 0, eps});
  all.push_back({"add_rms_norm", {x(1), x(2), weight()}, {value, value, stats}, 1, eps});
  all.push_back(
      {"rms_norm_grad_add", {x(1), x(2), weight(), normal(kF32, rows, 8, 0.1, 1), x(3)}, {value, sum, value}, 2});
  return all;
}

/// Values of which one is infinite and one no number, each in a row and a column of its own where there are two.
PoisonedTensor special(DType t, const Extents& size) {
  std::vector<float> x = testkit::random_normal(element_count(size), 3);
  x.front() = std::nanf(""), x.back() = std::numeric_limits<float>::infinity();
  return PoisonedTensor(t, size, x);
}

/// "<producer>_quantize_rows_columns", or without a producer of x itself, gives the bits of its parts, whatever outputs
/// are read: of the producer on the GPU and of quantized values on the CPU, which takes rows of any length.
void compare_lines(const DevicePair& pair, const Producer& producer, const std::string& name, bool stochastic) {
  const DType format = quantized_format_named(name)->dtype;
  const bool alone = producer.kind.empty();
  const Extents size = alone ? producer.inputs[0].view().extents : producer.outputs[0].extents;
  const std::vector<Operand> made = {operand(format, size), operand(kF32, {size[0]}), operand(format, turned(size)),
                                     operand(kF32, {size[1]})};
  Attributes attributes{{"format", name}};
  if (stochastic) attributes.set("stochastic", std::int64_t{1});
  OpInstance fused{
      alone ? "quantize_rows_columns" : producer.kind + "_quantize_rows_columns", {}, producer.outputs, attributes, {}};
  fused.outputs.insert(fused.outputs.end(), made.begin(), made.end());
  CAPTURE(fused.kind);
  if (!pair.open) {
    for (const PoisonedTensor& tensor : producer.inputs)
      fused.inputs.push_back(operand(tensor.view().dtype, tensor.view().extents));
    CHECK(pair.gpu->query(fused).refusal == "");
    return;
  }
  if (!affordable(element_count(size))) return;
  Device& gpu = *pair.gpu;
  Tensors want = alone ? producer.inputs
                       : launch_once(gpu, {producer.kind, {}, producer.outputs, {}, {}}, views_of(producer.inputs));
  want.erase(want.begin() + 1, want.end());
  for (auto [kind, first] : {std::pair{"quantize_rows", 0}, std::pair{"quantize_columns", 2}}) {
    const auto at = made.begin() + first;
    Tensors codes = launch_once(*pair.cpu, {kind, {}, {at, at + 2}, attributes, {}}, {want[0].view()});
    want.insert(want.end(), codes.begin(), codes.begin() + 2);
  }
  if (alone) want.erase(want.begin());
  for (std::size_t unread = 0; unread <= fused.outputs.size(); ++unread) {
    CAPTURE(unread);
    OpInstance op = fused;
    if (unread < op.outputs.size()) op.outputs[unread].present = false;
    Tensors got = launch_once(gpu, op, views_of(producer.inputs));
    for (std::size_t i = 0; i < fused.outputs.size(); ++i)
      if (i != unread) CHECK(same_bits(got[i], want[i]));
  }
}

enum class Positions { inside, some_outside };

Producer rope_grad(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
                   Positions where = Positions::inside) {
  PoisonedTensor positions = integers(tokens, 0, tokens, 5);
  if (where == Positions::some_outside) {
    positions.view().as<std::int32_t>()[0] = -1;
    positions.view().as<std::int32_t>()[tokens - 1] = static_cast<std::int32_t>(tokens);
  }
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < head_dim / 2; ++i)
    frequencies.push_back(std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim)));
  const Extents size{tokens, (heads + 2) * head_dim};
  return {"rope_grad",
          {normal(kBf16, size, 1), positions},
          {operand(kBf16, size)},
          0,
          {{"heads", heads},
           {"kv_heads", std::int64_t{1}},
           {"head_dim", head_dim},
           {"inverse_frequencies", frequencies},
           {"magnitude", 1.25}},
          {1, tokens}};
}

/// With the bias's gradient behind it; compared with rope_grad_column_sum, whose bits fused_ops_test.cpp holds.
Producer rope_grad_column_sum(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim, DType sum,
                              bool accumulate, Positions where = Positions::inside) {
  Producer producer = rope_grad(tokens, heads, head_dim, where);
  producer.kind = "rope_grad_column_sum";
  producer.outputs.push_back({sum, {producer.outputs[0].extents[1]}, true, accumulate});
  return producer;
}

/// With a scale at which values of a format reach `largest`.
PoisonedTensor state_reaching(float largest, DType format = kE4m3) {
  PoisonedTensor state = zero_state(2);
  state.view().as<ScaleState>()->scale = format_scale(largest, format);
  return state;
}
constexpr float kFits = 14.0f, kClips = 0.1f;  ///< clips: a launch that finds so quantizes again

}  // namespace

TEST_CASE("producers that quantize what they make give the bits of the two ops") {
  DevicePair pair = open_pair();
  for (const Extents& size :
       {Extents{33, 17}, Extents{64, 64}, Extents{272, 144}, Extents{19, 896}, Extents{16, 3584}}) {
    std::vector<Producer> all = producers(size);
    all.push_back(rope_grad(size[0], 3, 64));
    all.push_back(rope_grad(size[0], 2, 6));
    all.push_back(rope_grad_column_sum(size[0], 3, 64, kF32, false));
    all.push_back(rope_grad_column_sum(size[0], 2, 64, kBf16, false));  // a key and a value head in one tile
    all.push_back(rope_grad_column_sum(size[0], 2, 6, kBf16, true));
    for (const Producer& producer : all) {
      CAPTURE(to_string(size));
      for (DType format : {kE4m3, kE5m2, DType::i8}) {
        if (format != kE4m3 && size[0] != 33 && size[0] != 272) continue;  // a part of a tile, and several
        compare_fused(pair, producer, "quantize", {}, format);
        if (!producer.kind.starts_with("rope_grad"))
          compare_fused(pair, producer, "quantize_by", {PoisonedTensor(kF32, {1}, std::vector<float>{0.0625f})},
                        format);
        if (format == DType::i8) continue;  // has no delayed scale
        compare_fused(pair, producer, "quantize_delayed", {zero_state(2)}, format);
        compare_fused(pair, producer, "quantize_delayed", {state_reaching(kFits, format)}, format);
        compare_fused(pair, producer, "quantize_delayed", {state_reaching(kClips, format)}, format);
      }
    }
  }
}

namespace {

void compare_lines(const DevicePair& pair, const Extents& size, DType t) {
  CAPTURE(to_string(size));
  CAPTURE(std::string(name_of(t)));
  for (auto [format, stochastic] : {std::pair{"i8", false}, {"i8", true}, {"e4m3", false}, {"i4", true}}) {
    CAPTURE(stochastic);
    compare_lines(pair, {"", {special(t, size)}, {}, 0}, format, stochastic);
    if (t == kBf16)  // as all values with fused quantization are
      for (const Producer& producer : producers(size))
        if (producer.kind.starts_with("swiglu")) compare_lines(pair, producer, format, stochastic);
  }
}

}  // namespace

TEST_CASE("producers quantized with block scales give the bits of the two ops") {
  DevicePair pair = open_pair();
  for (const Extents& size : {Extents{1, 128}, Extents{33, 17}, Extents{130, 256}, Extents{272, 144},
                              Extents{400, 1280}, Extents{16, 4864}}) {
    CAPTURE(to_string(size));
    for (Producer& producer : producers(size)) {
      if (producer.kind == "rms_norm_grad_add") continue;
      if (producer.kind == "swiglu_grad" && size[1] % kScaleBlock != 0) continue;  // refused, below
      if (size[0] == 130 && producer.kind.starts_with("swiglu"))
        producer.inputs.back() = special(kBf16, producer.inputs.back().view().extents);
      for (DType format : {kE4m3, kE5m2})
        for (const char* way : kBlockWays) compare_fused(pair, producer, way, {}, format);
    }
  }
}

TEST_CASE("values in fp32 are not fused with quantization") {
  const Extents size{16, 128};
  std::vector<Producer> all = producers(size);
  all.push_back(rope_grad(size[0], 3, 64));
  const DevicePair pair = open_pair();
  for (const Producer& producer : all) {
    std::vector<std::string> ways{"quantize", "quantize_blocks", "quantize_squares"};
    if (producer.kind == "rms_norm_grad_add") ways = {"quantize"};
    for (const std::string& way : ways) {
      OpInstance op{producer.kind + "_" + way, {}, producer.outputs, producer.attributes, producer.geometry};
      for (const PoisonedTensor& tensor : producer.inputs)
        op.inputs.push_back(operand(tensor.view().dtype, tensor.view().extents));
      for (std::vector<Operand>* operands : {&op.inputs, &op.outputs})
        for (Operand& each : *operands)
          if (each.dtype == kBf16) each.dtype = kF32;
      const std::vector<Operand> made = codes(kE4m3, producer.outputs[producer.result].extents, way);
      op.outputs.insert(op.outputs.end(), made.begin(), made.end());
      op.attributes.set("format", std::string("e4m3"));
      CAPTURE(op.kind);
      CHECK(pair.gpu->query(op).refusal.find("is fused with quantization only in bf16") != std::string::npos);
    }
  }
}

TEST_CASE("where a block of scales would have gate and up columns, their gradients are not fused with quantization") {
  const Extents size{8, 192}, packed{8, 384};
  std::vector<Operand> outputs = codes(kE4m3, packed, "quantize_blocks");
  outputs.insert(outputs.begin(), operand(kBf16, packed));
  const OpInstance op{
      "swiglu_grad_quantize_blocks", {operand(kBf16, size), operand(kBf16, packed)}, outputs, format_of(kE4m3), {}};
  CHECK(open_pair().gpu->query(op).refusal.find("needs gates of whole blocks of 128 columns") != std::string::npos);
}

TEST_CASE("rows and columns quantized in one op, alone and behind swiglu, have the bits of the ops apart") {
  DevicePair pair = open_pair();
  for (const Extents& size : {Extents{1, 1}, Extents{33, 17}, Extents{272, 144}, Extents{5, 1000}, Extents{300, 1288}})
    for (DType t : {kF32, kBf16}) compare_lines(pair, size, t);
}

TEST_CASE("rows and columns of many and of long rows, quantized in one op, have the bits of the ops apart") {
  DevicePair pair = open_pair();
  if (!affordable(48 * 9728)) {
    MESSAGE("skipped: left to a GPU");
    return;
  }
  compare_lines(pair, Extents{4096, 896}, kBf16);
  for (const Extents& size : {Extents{48, 9728}, Extents{16, 18944}, Extents{3, 20480}})
    for (DType t : {kF32, kBf16}) compare_lines(pair, size, t);
}

TEST_CASE("the bias's gradient beside quantization has the bits of the two ops at any number of tokens and heads") {
  DevicePair pair = open_pair();
  for (std::int64_t tokens : {1, 127, 130, 144, 1027}) {
    for (std::int64_t head_dim : {6, 16, 32, 34, 64, 80, 128}) {  // those that divide a tile of 128 columns, and others
      for (DType sum : {kF32, kBf16}) {
        CAPTURE(tokens);
        CAPTURE(head_dim);
        CAPTURE(std::string(name_of(sum)));
        const Producer producer = rope_grad_column_sum(tokens, 2, head_dim, sum, tokens % 2 == 0);
        compare_fused(pair, producer, "quantize", {});
        compare_fused(pair, producer, "quantize_delayed", {state_reaching(kFits)});
        compare_fused(pair, producer, "quantize_delayed", {state_reaching(kClips)});
        for (const char* way : kBlockWays)
          if (head_dim % 16 == 0 && 128 % head_dim == 0) compare_fused(pair, producer, way, {});
      }
    }
  }
  if (!pair.open) return;
  const Producer large = rope_grad_column_sum(40000, 16, 64, kBf16, true);  // a block takes many tiles
  compare_fused(pair, large, "quantize_delayed", {state_reaching(kFits)});
}

TEST_CASE("positions outside the rotation's table: the bits of the two ops, other positions unchanged") {
  DevicePair pair = open_pair();
  for (std::int64_t tokens : {2, 33, 130, 144}) {
    for (std::int64_t head_dim : {6, 34, 64, 80, 128}) {  // of 6 and 34: eight columns are in key and value heads
      CAPTURE(tokens);
      CAPTURE(head_dim);
      for (const Producer& producer :
           {rope_grad(tokens, 2, head_dim, Positions::some_outside),
            rope_grad_column_sum(tokens, 2, head_dim, kF32, false, Positions::some_outside)}) {
        compare_fused(pair, producer, "quantize", {});
        compare_fused(pair, producer, "quantize_delayed", {state_reaching(kFits)});
        for (const char* way : kBlockWays)
          if (128 % head_dim == 0) compare_fused(pair, producer, way, {});
      }
    }
  }
}
