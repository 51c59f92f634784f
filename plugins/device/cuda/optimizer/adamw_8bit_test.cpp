// AdamW with moments in 8 bits: both kernels have the same bits, and all but few of them are the CPU device's.
#include <cmath>
#include <cstring>

#include "quern/step_state.h"
#include "tests/device_pair.h"

using namespace quern;
using namespace quern::cuda;
using testkit::PoisonedTensor;

namespace {

struct Formats {
  DType gradient, master, moments;
};

Operand present(DType dtype, const Extents& extents) { return {dtype, extents, true}; }

OpInstance adamw_8bit(const Formats& formats, const std::vector<Extents>& tensors, std::int64_t block) {
  OpInstance op{"adamw_8bit", {present(DType::f32, {4}), present(DType::u32, {16})}, {}, {}, {}};
  op.attributes = {{"beta1", 0.9}, {"beta2", 0.95}, {"eps", 1e-8}, {"weight_decay", 0.1}, {"block", block}};
  std::vector<double> offsets, objects;
  for (const Extents& extents : tensors) {
    const Extents scales{extents[0], (extents[1] + block - 1) / block};
    op.inputs.push_back(present(formats.gradient, extents));
    for (const Operand& updated :
         {present(formats.master, extents), present(formats.moments, extents), present(formats.moments, extents),
          present(DType::f32, scales), present(DType::f32, scales)}) {
      op.inputs.push_back(updated);
      op.outputs.push_back(updated);
    }
    offsets.push_back(static_cast<double>(4 * objects.size()));
    objects.push_back(static_cast<double>(3 + objects.size()));
  }
  op.attributes.set("offsets", std::move(offsets));
  op.attributes.set("objects", std::move(objects));
  return op;
}

/// Of every ninth element all is zero but the master; of the first row gradients are as small as 1e-18.
std::vector<PoisonedTensor> values_of(const OpInstance& op) {
  UpdateState update;
  update.gradient_scale = 0.5f, update.apply = 1.0f;
  StepState step;
  step.step = 7, step.updates = 3, step.seed_low = 17, step.seed_high = 3, step.learning_rate = 0.01f;
  std::vector<PoisonedTensor> values{testkit::words(DType::f32, update), testkit::words(DType::u32, step)};
  for (std::size_t i = 2; i < op.inputs.size(); ++i) {
    const Operand& input = op.inputs[i];
    const std::size_t part = (i - 2) % 6;  // gradient, master, moments, scales
    std::vector<float> numbers =
        testkit::random_normal(element_count(input.extents), i, part == 2 || part == 3 ? 40 : 1);
    for (std::size_t j = 0; j < numbers.size(); ++j) {
      if (part > 2) numbers[j] = std::fabs(numbers[j]);
      if (part > 3) numbers[j] *= 1e-4f;
      if (part == 0) numbers[j] *= j < static_cast<std::size_t>(input.extents[1]) ? 1e-18f : 1e-3f;
      if (part != 1 && part < 4 && j % 9 == 0) numbers[j] = 0;
    }
    values.emplace_back(input.dtype, input.extents, numbers);
  }
  return values;
}

/// Outputs after one launch; operands begin `shift` bytes behind an aligned address, but for f32.
std::vector<PoisonedTensor> launch(Device& device, const OpInstance& op, const std::vector<PoisonedTensor>& values,
                                   std::size_t shift) {
  const Stream stream = device.stream(StreamKind::compute);
  std::vector<void*> blocks;
  std::vector<View> in, out;
  for (const PoisonedTensor& value : values) {
    View view = value.view();
    blocks.push_back(device.allocate(MemoryKind::device, view.bytes() + 64));
    view.data = static_cast<std::byte*>(blocks.back()) + shift;
    device.copy(view.data, value.view().data, view.bytes(), stream);
    in.push_back(view);
  }
  for (std::size_t i = 2; i < in.size(); ++i)
    if ((i - 2) % 6 > 0) out.push_back(in[i]);
  device.prepare(op)->launch(in, out, {stream, nullptr});
  std::vector<PoisonedTensor> results;
  for (const View& view : out) {
    results.emplace_back(view.dtype, view.extents);
    device.copy(results.back().view().data, view.data, view.bytes(), stream);
  }
  device.synchronize(stream);
  for (void* block : blocks) device.release(MemoryKind::device, block);
  return results;
}

std::int64_t differing(const PoisonedTensor& a, const PoisonedTensor& b) {
  const std::size_t each = size_of(a.view().dtype);
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < a.view().count(); ++i)
    count += std::memcmp(a.view().as<char>() + static_cast<std::size_t>(i) * each,
                         b.view().as<char>() + static_cast<std::size_t>(i) * each, each) != 0;
  return count;
}

}  // namespace

TEST_CASE(
    "adamw_8bit: neighbours or elements one by one, the same bits, and nearly all bytes of moments are the CPU "
    "device's") {
  const DevicePair pair = open_pair();
  if (!pair.open) return;
  const std::vector<Extents> tensors{{3, 256}, {2, 200}, {1, 8}, {3, 132}, {3, 131}, {1, 1096}};
  std::int64_t bytes = 0, others = 0;
  for (const Formats& formats : {Formats{DType::bf16, DType::bf16, DType::i8},
                                 {DType::bf16, DType::bf16, DType::e4m3},
                                 {DType::f32, DType::f32, DType::i8},
                                 {DType::bf16, DType::f32, DType::e4m3}})
    for (std::int64_t block : {128, 256}) {
      CAPTURE(name_of(formats.moments));
      CAPTURE(block);
      const OpInstance op = adamw_8bit(formats, tensors, block);
      const std::vector<PoisonedTensor> values = values_of(op);
      const auto whole = launch(*pair.gpu, op, values, 0), one_by_one = launch(*pair.gpu, op, values, 4),
                 want = launch(*pair.cpu, op, values, 0);
      for (std::size_t i = 0; i < want.size(); ++i) {
        CAPTURE(i);
        CHECK(differing(whole[i], one_by_one[i]) == 0);
        if (size_of(want[i].view().dtype) > 1) continue;
        bytes += want[i].view().count();
        others += differing(whole[i], want[i]);
      }
    }
  // Moments differ in their last bits, with them scales, and few of their bytes by it.
  CHECK(others <= bytes / 1000);
}
