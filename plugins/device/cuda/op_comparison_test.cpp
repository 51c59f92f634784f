// The helpers of op_comparison.h.
#include "op_comparison.h"

#include <cstring>

#include "cuda_device.h"
#include "plugin/plugin_host.h"
#include "quern/error.h"
#include "quern/random.h"

namespace quern::cuda {

using testkit::PoisonedTensor;

namespace {

constexpr std::size_t kGuardBytes = 256;
constexpr std::uint8_t kGuard = 0xA5;

/// Device memory with guarded bytes behind it, of a view's size; freed with the object.
class Block {
 public:
  Block(Device& device, std::size_t bytes) : device_(device), bytes_(bytes) {
    memory_ = device.allocate(MemoryKind::device, bytes + kGuardBytes);
    Stream stream = device.stream(StreamKind::compute);
    device.fill(memory_, 0xFF, bytes, stream);
    device.fill(static_cast<char*>(memory_) + bytes, kGuard, kGuardBytes, stream);
    device.synchronize(stream);
  }
  Block(Block&& other) noexcept
      : device_(other.device_), memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}
  ~Block() { device_.release(MemoryKind::device, memory_); }

  void* memory() const { return memory_; }
  void write(const void* host) {
    Stream stream = device_.stream(StreamKind::compute);
    device_.copy(memory_, host, bytes_, stream);
    device_.synchronize(stream);
  }
  void read(void* host) const {
    Stream stream = device_.stream(StreamKind::compute);
    device_.copy(host, memory_, bytes_, stream);
    device_.synchronize(stream);
  }
  bool guarded() const {
    std::uint8_t guard[kGuardBytes];
    Stream stream = device_.stream(StreamKind::compute);
    device_.copy(guard, static_cast<char*>(memory_) + bytes_, kGuardBytes, stream);
    device_.synchronize(stream);
    for (std::uint8_t byte : guard)
      if (byte != kGuard) return false;
    return true;
  }

 private:
  Device& device_;
  void* memory_ = nullptr;
  std::size_t bytes_;
};

bool same_bytes(const View& a, const View& b) { return a.bytes() == 0 || std::memcmp(a.data, b.data, a.bytes()) == 0; }

std::string compare(const View& got, const View& want, const Tolerance& tolerance) {
  if (got.dtype == DType::u32 || got.dtype == DType::i32) return same_bytes(got, want) ? "" : "integers differ";
  return testkit::mismatch(testkit::to_floats(got), testkit::to_floats(want), tolerance.relative, tolerance.absolute);
}

}  // namespace

std::optional<DevicePair> open_pair() {
  DevicePair pair;
  CudaOptions options;
  options.matmul_cache = false;
  pair.gpu = std::make_unique<CudaDevice>(options);
  try {
    pair.gpu->open(0);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resources) throw;
    MESSAGE("skipped: " << error.what());
    return std::nullopt;
  }
  static PluginHost host({std::filesystem::path(QUERN_BUILD_DIR) / "plugins"});  // never unloads what it loaded
  pair.cpu = host.create<Device>("cpu", default_values(host.require("device", "cpu").options));
  pair.cpu->open(0);
  return pair;
}

OpComparison::OpComparison(std::string kind, Attributes attributes, Geometry geometry) {
  op_.kind = std::move(kind);
  op_.attributes = std::move(attributes);
  op_.geometry = geometry;
}

OpComparison& OpComparison::in(PoisonedTensor tensor) {
  op_.inputs.push_back({tensor.view().dtype, tensor.view().extents, true, false});
  inputs_.push_back(std::move(tensor));
  return *this;
}

OpComparison& OpComparison::absent() {
  op_.inputs.push_back({});
  inputs_.emplace_back(DType::u8, Extents{0});
  return *this;
}

OpComparison& OpComparison::out(DType dtype, Extents extents, Tolerance tolerance) {
  op_.outputs.push_back({dtype, std::move(extents), true, false});
  outputs_.push_back({tolerance, -1, -1});
  return *this;
}

OpComparison& OpComparison::sum(DType dtype, Extents extents, Tolerance tolerance) {
  outputs_.push_back({tolerance, -1, static_cast<int>(initial_.size())});
  initial_.push_back(normal(dtype, extents, 1000 + initial_.size()));
  op_.outputs.push_back({dtype, std::move(extents), true, true});
  return *this;
}

OpComparison& OpComparison::unread(DType dtype, Extents extents) {
  op_.outputs.push_back({dtype, std::move(extents), false, false});
  outputs_.push_back({});
  return *this;
}

OpComparison& OpComparison::update(std::size_t i, Tolerance tolerance) {
  Operand operand = op_.inputs.at(i);
  op_.outputs.push_back(operand);
  outputs_.push_back({tolerance, static_cast<int>(i), -1});
  return *this;
}

std::string OpComparison::label() const {
  std::string text = op_.kind + "(";
  for (const Operand& input : op_.inputs)
    text += (input.present ? std::string(name_of(input.dtype)) + to_string(input.extents) : "-") + " ";
  text += ") -> (";
  for (const Operand& output : op_.outputs)
    text += std::string(name_of(output.dtype)) + to_string(output.extents) +
            (output.accumulate ? "+ "
             : output.present  ? " "
                               : "? ");
  return text + ")";
}

OpComparison::Results OpComparison::run_on(Device& device, How how) const {
  OpSupport support = device.query(op_);
  REQUIRE(support.refusal == "");
  std::vector<Block> blocks;
  blocks.reserve(inputs_.size() + outputs_.size() + 1);
  std::vector<View> inputs, outputs;
  std::vector<int> input_blocks(inputs_.size(), -1), output_blocks(outputs_.size(), -1);
  auto block_of = [&](const Operand& operand, const void* content) {
    blocks.emplace_back(device, static_cast<std::size_t>(operand.bytes()));
    if (content != nullptr) blocks.back().write(content);
    return static_cast<int>(blocks.size()) - 1;
  };
  auto view_of = [&](const Operand& operand, int block) {
    return block < 0 ? View{} : View{blocks[static_cast<std::size_t>(block)].memory(), operand.dtype, operand.extents};
  };
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (op_.inputs[i].present) input_blocks[i] = block_of(op_.inputs[i], inputs_[i].view().data);
    inputs.push_back(view_of(op_.inputs[i], input_blocks[i]));
  }
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const Output& output = outputs_[i];
    if (output.updates >= 0) {
      output_blocks[i] = input_blocks[static_cast<std::size_t>(output.updates)];
    } else if (op_.outputs[i].present) {
      output_blocks[i] =
          block_of(op_.outputs[i],
                   output.initial < 0 ? nullptr : initial_[static_cast<std::size_t>(output.initial)].view().data);
    }
    outputs.push_back(view_of(op_.outputs[i], output_blocks[i]));
  }
  blocks.emplace_back(device, support.workspace_bytes);
  Stream stream = device.stream(StreamKind::compute);
  std::unique_ptr<Kernel> kernel = device.prepare(op_);
  auto launch = [&] { kernel->launch(inputs, outputs, {stream, blocks.back().memory()}); };
  std::unique_ptr<Graph> graph;
  if (how == How::captured) {
    graph = device.capture(stream, launch);
    graph->launch(stream);
  } else {
    launch();
  }
  device.synchronize(stream);
  for (const Block& block : blocks) CHECK_MESSAGE(block.guarded(), "written behind an operand");
  Results results;
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    results.emplace_back(op_.outputs[i].dtype, op_.outputs[i].present ? op_.outputs[i].extents : Extents{0});
    if (output_blocks[i] >= 0) blocks[static_cast<std::size_t>(output_blocks[i])].read(results.back().view().data);
  }
  return results;
}

void OpComparison::run(DevicePair& devices) const {
  CAPTURE(label());
  OpSupport support = devices.gpu->query(op_);
  CHECK(support.refusal == "");
  if (!support.refusal.empty()) return;
  Results want = run_on(*devices.cpu, How::eager), got = run_on(*devices.gpu, How::eager);
  Results again = run_on(*devices.gpu, How::eager), captured = run_on(*devices.gpu, How::captured);
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    CAPTURE(i);
    if (!op_.outputs[i].present) continue;
    CHECK(compare(got[i].view(), want[i].view(), outputs_[i].tolerance) == "");
    CHECK_MESSAGE(same_bytes(got[i].view(), again[i].view()), "a second run gives other bits");
    CHECK_MESSAGE(same_bytes(got[i].view(), captured[i].view()), "capture changes bits");
  }
}

PoisonedTensor normal(DType dtype, Extents extents, std::uint64_t seed, double deviation, double mean) {
  std::vector<float> values = testkit::random_normal(element_count(extents), seed, deviation);
  for (float& value : values) value += static_cast<float>(mean);
  return PoisonedTensor(dtype, std::move(extents), values);
}

PoisonedTensor integers(std::int64_t count, std::int64_t lowest, std::int64_t end, std::uint64_t seed) {
  PoisonedTensor tensor(DType::i32, {count});
  RandomKey key{seed, RandomPurpose::init, 0};
  for (std::int64_t i = 0; i < count; ++i)
    tensor.view().as<std::int32_t>()[i] = static_cast<std::int32_t>(
        lowest + random_word(key, 0, static_cast<std::uint64_t>(i)) % static_cast<std::uint64_t>(end - lowest));
  return tensor;
}

PoisonedTensor integer_list(const std::vector<std::int32_t>& values) {
  PoisonedTensor tensor(DType::i32, {static_cast<std::int64_t>(values.size())});
  std::memcpy(tensor.view().data, values.data(), values.size() * sizeof(std::int32_t));
  return tensor;
}

}  // namespace quern::cuda
