#include "conformance/model/own_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>

#include "base/format.h"
#include "conformance/harness/growth.h"
#include "conformance/harness/meanwhile.h"
#include "conformance/model/own_op_forms.h"
#include "conformance/report.h"
#include "quern/testkit/device_memory.h"
#include "quern/testkit/op_comparison.h"
#include "quern/testkit/op_launch.h"

namespace quern::conformance {

namespace {

using testkit::DeviceMemory;
using testkit::OpComparison;
using testkit::PoisonedTensor;

constexpr int kRepeats = 20;

bool is_float(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; }

PoisonedTensor operand_of(const Operand& operand, std::uint64_t seed) {
  if (operand.dtype != DType::i32) return testkit::normal(operand.dtype, operand.extents, seed);
  PoisonedTensor flat = testkit::integers(operand.count(), -1, 2, seed), tensor(DType::i32, operand.extents);
  std::memcpy(tensor.view().data, flat.view().data, flat.view().bytes());
  return tensor;
}

/// `over`: an output and the input that it overwrites, where an output may.
OpComparison comparison_of(const OpInstance& op, const std::vector<PoisonedTensor>& inputs,
                           const std::pair<int, int>* over = nullptr) {
  OpComparison made(op.kind, op.attributes, op.geometry);
  made.nan_beside_inputs();
  for (std::size_t i = 0; i < inputs.size(); ++i) op.inputs[i].present ? made.in(inputs[i]) : made.absent();
  for (std::size_t o = 0; o < op.outputs.size(); ++o) {
    const Operand& output = op.outputs[o];
    if (over && over->first == static_cast<int>(o))
      made.update(static_cast<std::size_t>(over->second), {});
    else if (output.present && output.accumulate)
      made.sum(output.dtype, output.extents, {});
    else
      output.present ? made.out(output.dtype, output.extents, {}) : made.unread(output.dtype, output.extents);
  }
  return made;
}

OpComparison::Results results_of(const OpComparison& op, Device& device, const std::string& how) {
  std::vector<std::string> faults;
  OpComparison::Results results = op.run_on(device, OpComparison::How::eager, faults);
  if (!faults.empty()) broken(op.label() + how, faults[0], "nothing else written");
  return results;
}

void need_equal(const OpComparison::Results& got, const OpComparison::Results& want, const std::string& what) {
  for (std::size_t o = 0; o < want.size(); ++o)
    need(std::memcmp(got[o].view().data, want[o].view().data, want[o].view().bytes()) == 0,
         what + ", output " + std::to_string(o), testkit::mismatch(got[o].floats(), want[o].floats(), 0),
         "the same bits");
}

/// A value in bf16 is the value in f32 of the same operands, rounded once.
void need_rounded_once(const OpInstance& narrow, const std::vector<PoisonedTensor>& inputs,
                       const OpComparison::Results& got, Device& device) {
  OpInstance wide = narrow;
  std::vector<PoisonedTensor> values;
  for (const PoisonedTensor& input : inputs) {
    const View& view = input.view();
    values.push_back(view.dtype == DType::bf16 ? PoisonedTensor(DType::f32, view.extents, input.floats()) : input);
  }
  bool any = false;
  for (auto* operands : {&wide.inputs, &wide.outputs})
    for (Operand& operand : *operands)
      if (operand.dtype == DType::bf16) operand.dtype = DType::f32, any = true;
  if (!any || !device.query(wide).refusal.empty()) return;
  const OpComparison op = comparison_of(wide, values);
  const OpComparison::Results want = results_of(op, device, "");
  for (std::size_t o = 0; o < want.size(); ++o) {
    const Operand& output = narrow.outputs[o];
    if (!output.present || !is_float(output.dtype) || (output.accumulate && output.dtype == DType::bf16)) continue;
    const std::vector<float> exact = want[o].floats();
    float largest = 0;
    for (float value : exact) largest = std::max(largest, std::fabs(value));
    // Half a unit of bf16 is 2^-9 of the value at most; sums in another order differ by far less.
    const double relative = output.dtype == DType::bf16 ? 0x1.1p-8 : 1e-5;
    const std::string differs = testkit::mismatch(got[o].floats(), exact, relative, 1e-5 * largest);
    need(differs.empty(), op.label() + " in bf16, output " + std::to_string(o), differs,
         "what it gives in f32, rounded once");
  }
}

std::vector<PoisonedTensor> operands_of(const OpInstance& op, std::uint64_t seed) {
  std::vector<PoisonedTensor> inputs;
  for (const Operand& operand : op.inputs)
    inputs.push_back(operand.present ? operand_of(operand, seed + inputs.size()) : PoisonedTensor(operand.dtype, {0}));
  return inputs;
}

/// What an output that adds up begins with in Launch and OpComparison; `number` counts these outputs.
PoisonedTensor initial_of(const Operand& output, std::uint64_t number) {
  return testkit::normal(output.dtype, output.extents, 1000 + number);
}

/// A kernel with operands of its own, for one launch among several. Outputs that add up begin anew in each.
struct Launch {
  Device& device;
  Stream stream;
  std::shared_ptr<Kernel> kernel;
  std::deque<DeviceMemory> memory;
  std::vector<View> inputs, outputs;
  std::vector<std::pair<View, PoisonedTensor>> sums;
  void* workspace = nullptr;

  Launch(Device& of, const OpInstance& op, std::shared_ptr<Kernel> prepared, std::uint64_t seed, Stream on)
      : device(of), stream(on), kernel(std::move(prepared)) {
    auto place = [&](const Operand& operand) {
      if (!operand.present) return View{nullptr, operand.dtype, operand.extents};
      memory.emplace_back(device, static_cast<std::size_t>(operand.bytes()));
      return View{memory.back().data(), operand.dtype, operand.extents};
    };
    const std::vector<PoisonedTensor> values = operands_of(op, seed);
    for (std::size_t i = 0; i < values.size(); ++i) {
      inputs.push_back(place(op.inputs[i]));
      if (inputs.back()) memory.back().write(values[i].view().data);
    }
    for (const Operand& output : op.outputs) {
      outputs.push_back(place(output));
      if (output.present && output.accumulate) sums.emplace_back(outputs.back(), initial_of(output, sums.size()));
    }
    memory.emplace_back(device, device.query(op).workspace_bytes);
    workspace = memory.back().data();
  }
  void operator()() const {
    for (const auto& [output, initial] : sums) device.copy(output.data, initial.view().data, output.bytes(), stream);
    kernel->launch(inputs, outputs, {stream, workspace});
  }
  /// An output that is not present is empty.
  OpComparison::Results results() const {
    OpComparison::Results all;
    for (const View& output : outputs) {
      all.emplace_back(output.dtype, output ? output.extents : Extents{0});
      if (output) device.copy(all.back().view().data, output.data, output.bytes(), stream);
    }
    device.synchronize(stream);
    return all;
  }
};

/// Launches of several ops, one after another.
struct Launches {
  std::deque<Launch> each;
  std::vector<std::string> kinds;

  Launches(Device& device, const std::vector<OpInstance>& ops, Stream stream) {
    for (const OpInstance& op : ops) {
      each.emplace_back(device, op, device.prepare(op), 205 + each.size(), stream);
      kinds.push_back(op.kind);
    }
  }
  /// All but one kind.
  void launch_without(const std::string& kind) const {
    for (std::size_t i = 0; i < each.size(); ++i)
      if (kinds[i] != kind) each[i]();
  }
};

/// Where ops are checked, and what other work runs meanwhile: a form of each own op, and a matmul.
struct Bench {
  Device &device, &another;
  Launches beside, elsewhere;

  Bench(Device& checked, Device& other, const std::vector<OpInstance>& others)
      : device(checked),
        another(other),
        beside(checked, others, checked.stream(StreamKind::copy_out)),
        elsewhere(other, others, other.stream(StreamKind::compute)) {}
};

/// Again and again, with two sets of operands, on two streams at once where the kernel allows it, while other ops run
/// on a third stream, and the same op and others on another device of this process.
void need_same_bits(const OpInstance& op, const Bench& bench) {
  Device& device = bench.device;
  const OpSupport support = device.query(op);
  const std::shared_ptr<Kernel> kernel = device.prepare(op);
  const Stream streams[] = {device.stream(StreamKind::compute),
                            device.stream(support.concurrent ? StreamKind::copy_in : StreamKind::compute),
                            device.stream(StreamKind::copy_out)};
  std::deque<Launch> launches;
  std::vector<OpComparison::Results> want;
  for (const std::size_t i : {0, 1}) {
    const std::uint64_t seed = 5 + 100 * i;
    want.push_back(results_of(comparison_of(op, operands_of(op, seed)), device, ""));
    launches.emplace_back(device, op, kernel, seed, streams[i]);
  }
  // The core runs ops of one kind one after another where a kernel keeps scratch of its own.
  const std::string exclusive = support.concurrent ? "" : op.kind;
  const Stream theirs = bench.another.stream(StreamKind::compute);
  const Launch same(bench.another, op, bench.another.prepare(op), 305, theirs);
  Meanwhile meanwhile([&] {
    same();
    bench.elsewhere.launch_without("");
    bench.another.synchronize(theirs);
  });
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    bench.beside.launch_without(exclusive);
    for (const Launch& launch : launches) launch();
    for (Stream stream : streams) device.synchronize(stream);
    for (const std::size_t i : {0, 1}) {
      const OpComparison::Results got = launches[i].results();
      for (std::size_t o = 0; o < got.size(); ++o)
        need(std::memcmp(got[o].view().data, want[i][o].view().data, got[o].view().bytes()) == 0,
             op.kind + ", launch " + std::to_string(repeat) + (support.concurrent ? " of two at once" : "") +
                 ", while other ops run, and the same on another device",
             "other bits", "the bits of the first launch");
    }
  }
  meanwhile.finish();
}

void need_no_growth_of(const OpInstance& op, Device& device) {
  const Stream stream = device.stream(StreamKind::compute);
  Launch launch(device, op, nullptr, 5, stream);
  need_no_growth(op.kind, [&] {
    launch.kernel = device.prepare(op);
    launch();
    device.synchronize(stream);
  });
}

void check_form(const OpInstance& op, const OpSpec& spec, const Bench& bench) {
  Device& device = bench.device;
  const std::vector<PoisonedTensor> inputs = operands_of(op, 5);
  const OpComparison comparison = comparison_of(op, inputs);
  const OpComparison::Results want = results_of(comparison, device, "");
  for (std::size_t o = 0; o < want.size(); ++o) {
    if (!op.outputs[o].present || !is_float(op.outputs[o].dtype)) continue;
    const std::vector<float> values = want[o].floats();
    const auto bad = std::find_if_not(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
    need(bad == values.end(),
         comparison.label() + ", element " + std::to_string(bad - values.begin()) + " of output " + std::to_string(o),
         "not written, or not finite",
         "a number; outputs and scratch are NaN before, and so are the bytes beside inputs");
  }
  const auto outputs = static_cast<int>(op.outputs.size()), operands = static_cast<int>(op.inputs.size());
  for (const std::pair<int, int>& over : spec.may_overwrite) {
    need(over.first >= 0 && over.first < outputs && over.second >= 0 && over.second < operands,
         "may_overwrite of " + op.kind,
         "output " + std::to_string(over.first) + ", input " + std::to_string(over.second), "operands of the op");
    const Operand &output = op.outputs[static_cast<std::size_t>(over.first)],
                  &input = op.inputs[static_cast<std::size_t>(over.second)];
    if (!output.present || output.accumulate || !input.present || output.dtype != input.dtype ||
        output.extents != input.extents)
      continue;
    need_equal(results_of(comparison_of(op, inputs, &over), device, " in place"), want,
               comparison.label() + " whose output " + std::to_string(over.first) + " overwrites input " +
                   std::to_string(over.second) + ", as may_overwrite says");
  }
  need_rounded_once(op, inputs, want, device);
  need_same_bits(op, bench);
}

OpComparison::Results added_to_zero(const OpInstance& op, Device& device) {
  Launch launch(device, op, device.prepare(op), 5, device.stream(StreamKind::compute));
  for (auto& [output, initial] : launch.sums) std::memset(initial.view().data, 0, output.bytes());
  launch();
  return launch.results();
}

/// An output that adds up has what was there before and the value of the same op in its checked form, which does not
/// add up, or adds to zero.
void check_sums(const OpInstance& op, const OpInstance& form, Device& device) {
  const std::vector<PoisonedTensor> inputs = operands_of(op, 5);
  const OpComparison::Results got = results_of(comparison_of(op, inputs), device, ""),
                              added = adds_up(form) ? added_to_zero(form, device)
                                                    : results_of(comparison_of(form, inputs), device, "");
  std::uint64_t sums = 0;
  for (std::size_t o = 0; o < op.outputs.size(); ++o) {
    const Operand& output = op.outputs[o];
    if (!output.present || !output.accumulate) continue;
    std::vector<float> want = initial_of(output, sums++).floats();
    const std::vector<float> more = added[o].floats();
    float largest = 1;
    for (std::size_t i = 0; i < want.size(); ++i) want[i] += more[i], largest = std::max(largest, std::fabs(want[i]));
    const std::string differs =
        testkit::mismatch(got[o].floats(), want, output.dtype == DType::bf16 ? 0x1p-7 : 1e-5, 1e-5 * largest);
    need(differs.empty(), op.kind + ", output " + std::to_string(o) + " that adds up", differs,
         "what was there, and the op's value");
  }
}

void check_op(const OpInstance& op, const OpSpec& spec, const Bench& bench) {
  const OpInstance form = checked_form(op, bench.device);
  check_form(form, spec, bench);
  if (adds_up(op)) check_sums(op, form, bench.device);
}

/// Zeros and ones, which all dtypes have.
PoisonedTensor flags(DType dtype, const Extents& extents) {
  std::vector<float> values(static_cast<std::size_t>(element_count(extents)));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = (i * i + i / 3) % 5 < 2 ? 1 : 0;
  if (dtype != DType::u8) return PoisonedTensor(dtype, extents, values);
  PoisonedTensor tensor(dtype, extents);
  std::ranges::copy(values, tensor.view().as<std::uint8_t>());
  return tensor;
}

/// The op with one of its inputs in bf16, activations and weights, in another dtype, as its OpSpec infers it, is
/// refused, or has the same values.
void need_known_dtypes(const OpInstance& op, const OpSpec& spec, Device& device) {
  const std::optional<DType> activation = activation_of(op, spec);
  if (!activation) return;
  for (std::size_t i = 0; i < op.inputs.size(); ++i)
    for (const DType dtype : {DType::f32, DType::f64, DType::i32, DType::u8, DType::e4m3}) {
      if (!op.inputs[i].present || op.inputs[i].dtype != DType::bf16) continue;
      OpInstance changed = op;
      changed.inputs[i].dtype = dtype;
      const auto other = inferred(changed, spec, shapes_of(op), op.geometry, *activation);
      if (!other || !takes(*other, device)) continue;
      std::vector<PoisonedTensor> inputs = operands_of(op, 5);
      inputs[i] = flags(op.inputs[i].dtype, op.inputs[i].extents);
      const OpComparison::Results want = results_of(comparison_of(op, inputs), device, "");
      inputs[i] = flags(dtype, op.inputs[i].extents);
      const OpComparison comparison = comparison_of(*other, inputs);
      const OpComparison::Results got = results_of(comparison, device, "");
      for (std::size_t o = 0; o < want.size(); ++o) {
        if (!op.outputs[o].present || op.outputs[o].dtype == DType::u32) continue;
        const std::vector<float> values = want[o].floats();
        float largest = 0;
        for (float value : values) largest = std::max(largest, std::fabs(value));
        const std::string differs = testkit::mismatch(got[o].floats(), values, 0x1p-6, 0x1p-6 * largest);
        need(differs.empty(), comparison.label() + ", which is accepted, output " + std::to_string(o), differs,
             "the values that it gives of the same numbers in " + std::string(name_of(op.inputs[i].dtype)) +
                 ", or a refusal of the dtype");
      }
    }
}

}  // namespace

std::string check_own_ops(const Subject& subject, const Plan& plan) {
  auto device = oracle(subject.host), another = oracle(subject.host);
  const std::vector<OpSpec> own = subject.host.ops();
  auto spec_of = [&](const std::string& kind) { return std::ranges::find(own, kind, &OpSpec::kind); };
  std::vector<OpInstance> seen, others;  // others: one of each kind
  std::vector<std::string> kinds, unused;
  for (const Task& task : plan.schedules.tasks) {
    const OpInstance& op = task.instance;
    const bool is_own = spec_of(op.kind) != own.end();
    if (is_own && std::ranges::find(seen, op) == seen.end()) seen.push_back(op);
    if ((!is_own && op.kind != "matmul") || std::ranges::find(others, op.kind, &OpInstance::kind) != others.end())
      continue;
    if (const OpInstance form = checked_form(op, *device); takes(form, *device)) others.push_back(form);
  }
  for (const OpSpec& spec : own)
    (std::ranges::find(seen, spec.kind, &OpInstance::kind) != seen.end() ? kinds : unused).push_back(spec.kind);
  const Bench bench(*device, *another, others);
  int resized_forms = 0;
  for (const OpInstance& op : seen) {
    const OpSpec& spec = *spec_of(op.kind);
    check_op(op, spec, bench);
    // 17 x 43, which no vector's width divides, and 102,641 elements, more than 16 bits count.
    for (const Geometry& geometry : {Geometry{1, 17}, Geometry{341, 7}})
      if (const auto other = resized(op, spec, geometry, 43); other && takes(*other, *device))
        check_op(*other, spec, bench), ++resized_forms;
  }
  for (const OpInstance& op : others) {
    if (op.kind == "matmul") continue;
    need_known_dtypes(op, *spec_of(op.kind), *device);
    need_no_growth_of(op, *device);
  }
  return std::to_string(seen.size()) + " forms of " + format_list(kinds) + ", " + std::to_string(resized_forms) +
         " of other sizes" + (unused.empty() ? "" : "; not checked, as its programs have none: " + format_list(unused));
}

}  // namespace quern::conformance
