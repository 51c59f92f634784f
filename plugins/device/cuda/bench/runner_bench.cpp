#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "bench.h"
#include "quern/error.h"
#include "quern/numeric.h"
#include "quern/step_state.h"

namespace quern::cuda::bench {

namespace {

constexpr std::size_t kRotated = std::size_t{256} << 20;  // bytes, several times any L2 cache
constexpr std::size_t kPattern = std::size_t{16} << 20;   // bytes of host data that operands repeat
constexpr double kSampleMs = 4, kCaseMs = 400;            // of one graph, and of all samples of a case
constexpr std::size_t kFewest = 5, kMost = 50;            // samples

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

Bench::Bench(CudaDevice& device)
    : device_(device), stream_(device.stream(StreamKind::compute)), pattern_(device, kPattern, MemoryKind::pinned) {}

double Bench::run(const Case& c) {
  OpInstance op{c.kind, {}, c.outputs, c.attributes, c.geometry};
  for (const BenchOperand& input : c.inputs) op.inputs.push_back(input.operand);
  OpSupport support = device_.query(op);
  if (!support.refusal.empty()) throw std::runtime_error(support.refusal);
  std::unique_ptr<Kernel> kernel = device_.prepare(op);
  std::size_t set_bytes = 256;
  for (const Operand& operand : op.inputs) set_bytes += aligned(static_cast<std::size_t>(operand.bytes()));
  for (const Operand& operand : op.outputs) set_bytes += aligned(static_cast<std::size_t>(operand.bytes()));
  const int sets = static_cast<int>(std::clamp<std::size_t>(kRotated / set_bytes + 1, 1, 64));
  Memory memory(device_, set_bytes * static_cast<std::size_t>(sets));
  Memory workspace(device_, std::max<std::size_t>(support.workspace_bytes, 256));
  std::vector<std::vector<View>> inputs, outputs;
  for (int set = 0; set < sets; ++set)
    bind(c, memory.data() + set_bytes * static_cast<std::size_t>(set), inputs, outputs);
  auto launch = [&](int i) {
    const auto set = static_cast<std::size_t>(i % sets);
    kernel->launch(inputs[set], outputs[set], {stream_, workspace.data()});
  };
  return median_ms(sets, launch);
}

double Bench::median_ms(int least_launches, const std::function<void(int)>& body) {
  while (events_.size() < kMost + 1) events_.push_back(device_.make_event());
  auto run = [&](int launches) {
    for (int i = 0; i < launches; ++i) body(i);
  };
  run(1);  // loads the code
  device_.record(events_[0], stream_);
  run(least_launches);
  device_.record(events_[1], stream_);
  device_.synchronize(stream_);
  const double once = std::max(device_.elapsed(events_[0], events_[1]) / least_launches, 1e-4);
  const int rounds = std::clamp(static_cast<int>(kSampleMs / (once * least_launches)), 1, 64);
  const int launches = rounds * least_launches;
  const auto samples = std::clamp(static_cast<std::size_t>(kCaseMs / (once * launches)), kFewest, kMost);
  std::unique_ptr<Graph> graph = device_.capture(stream_, [&] { run(launches); });
  graph->launch(stream_);
  device_.record(events_[0], stream_);
  for (std::size_t i = 1; i <= samples; ++i) {
    graph->launch(stream_);
    device_.record(events_[i], stream_);
  }
  device_.synchronize(stream_);
  std::vector<double> times;
  for (std::size_t i = 1; i <= samples; ++i) times.push_back(device_.elapsed(events_[i - 1], events_[i]) / launches);
  std::sort(times.begin(), times.end());
  return times[samples / 2];
}

void Bench::bind(const Case& c, std::byte* memory, std::vector<std::vector<View>>& inputs,
                 std::vector<std::vector<View>>& outputs) {
  auto place = [&memory](const Operand& operand) {
    View view{operand.present ? memory : nullptr, operand.dtype, operand.extents};
    if (operand.present) memory += aligned(view.bytes());
    return view;
  };
  std::vector<View> in, out;
  for (const BenchOperand& input : c.inputs) {
    in.push_back(place(input.operand));
    if (in.back()) fill(input, in.back());
  }
  for (std::size_t i = 0; i < c.outputs.size(); ++i) {
    auto same = std::find_if(c.in_place.begin(), c.in_place.end(),
                             [&](auto pair) { return pair.first == static_cast<int>(i); });
    out.push_back(same == c.in_place.end() ? place(c.outputs[i]) : in[static_cast<std::size_t>(same->second)]);
    if (out.back() && same == c.in_place.end()) device_.fill(out.back().data, 0, out.back().bytes(), stream_);
  }
  inputs.push_back(std::move(in));
  outputs.push_back(std::move(out));
}

void Bench::fill(const BenchOperand& input, const View& view) {
  const std::size_t bytes = view.bytes(), part = std::min(bytes, kPattern);
  const std::string pattern =
      std::to_string(static_cast<int>(input.fill)) + std::string(name_of(view.dtype)) + std::to_string(input.limit);
  if (pattern != written_) {
    device_.synchronize(stream_);  // the pattern is free again
    const bool block = input.fill == Fill::update || input.fill == Fill::step;
    write_pattern(input, view.dtype, (block ? part : kPattern) / size_of(view.dtype));
    written_ = pattern;
  }
  for (std::size_t done = 0; done < bytes; done += part)
    device_.copy(view.as<std::byte>() + done, pattern_.data(), std::min(part, bytes - done), stream_);
}

/// `count` elements; noise of order one, since matmuls of zeros run faster than matmuls of data.
void Bench::write_pattern(const BenchOperand& input, DType dtype, std::size_t count) {
  void* to = pattern_.data();
  std::uint64_t state = 0x9E3779B97F4A7C15u;
  auto next = [&state] {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state >> 32;
  };
  if (input.fill == Fill::update) {
    UpdateState update;
    update.gradient_scale = 1e-3f, update.apply = 1;
    std::memcpy(to, &update, sizeof update);
  } else if (input.fill == Fill::step) {
    StepState step;
    step.step = step.updates = 100, step.seed_low = 7, step.learning_rate = 1e-4f;
    std::memcpy(to, &step, sizeof step);
  } else if (input.fill == Fill::scale_state) {
    std::memset(to, 0, count * sizeof(float));
    static_cast<ScaleState*>(to)->scale = 0x1p-6f;
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      float value = static_cast<float>(static_cast<double>(next()) * 0x1p-31 - 1.0);
      if (input.fill == Fill::positive) value *= value;
      if (input.fill == Fill::positions)
        static_cast<std::int32_t*>(to)[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % input.limit);
      else if (input.fill == Fill::tokens)
        static_cast<std::int32_t*>(to)[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(next()) % input.limit);
      else if (dtype == DType::f32)
        static_cast<float*>(to)[i] = value;
      else if (dtype == DType::e4m3)
        static_cast<std::uint8_t*>(to)[i] = float_to_e4m3(value);
      else if (dtype == DType::i8)
        static_cast<std::int8_t*>(to)[i] = static_cast<std::int8_t>(127 * value);
      else
        static_cast<std::uint16_t*>(to)[i] = float_to_bf16(value);
    }
  }
}

}  // namespace quern::cuda::bench
