#include "quantization/quantize_plan.cuh"

#include <cmath>

namespace quern::cuda {

namespace {

static_assert(sizeof(ScaleState) <= QuantizePlan::kWorkspace);

DType format_of(const OpInstance& op) {
  return op.attributes.has("format") ? dtype_named(op.attributes.word("format")).value_or(DType::f32) : DType::f32;
}

}  // namespace

DType check_format(OperandCheck& check, const OpInstance& op) {
  const DType format = format_of(op);
  check.that(format == DType::e4m3 || format == DType::e5m2 || format == DType::i8,
             "needs a format of 8 bits: e4m3, e5m2 or i8");
  return format;
}

void check_fused(OperandCheck& check, const OpInstance& op) {
  if (check.ok()) check.that(op.inputs[0].dtype == DType::bf16, "is fused with quantization only in bf16");
}

QuantizePlan::QuantizePlan(const OpInstance& op, ScaleSource source, std::size_t inputs, std::size_t outputs,
                           Matrix size)
    : source_(source), size_(size), state_(inputs), q_(outputs) {
  scale_ = source == ScaleSource::given ? q_ : q_ + 1;  // none where it is given
  t_ = scale_ + 1;
  format_ = format_of(op);
  if (source == ScaleSource::delayed) {
    margin_ = op.attributes.integer_or("margin", 0);
    history_ = op.attributes.integer_or("history", 0);
  }
}

void QuantizePlan::check(OperandCheck& check, const OpInstance& op) const {
  check_format(check, op);
  if (source_ == ScaleSource::given) check.input(state_, "scale", {1}, DType::f32);
  if (source_ == ScaleSource::amax) check.input(state_, "amax", {1}, DType::f32);
  if (source_ == ScaleSource::delayed) {
    check.that(format_ != DType::i8, "needs a format e4m3 or e5m2");
    check.that(history_ >= 1 && margin_ >= -64 && margin_ <= 64, "needs a history above 0 and a margin of at most 64");
    check.input(state_, "state", {kScaleStateWords + history_}, DType::f32);
  }
  check.output(q_, "q", {size_.rows, size_.columns}, format_);
  if (source_ != ScaleSource::given) check.output(scale_, "scale", {1}, DType::f32);
  check.output(t_, "t", {size_.columns, size_.rows}, format_);
}

QuantizeArguments QuantizePlan::start(std::span<const View> inputs, std::span<const View> outputs,
                                      const Exec& exec) const {
  QuantizeArguments args{};
  args.q = q(outputs);
  args.t = t(outputs);
  args.format = format_;
  args.margin = std::ldexp(1.0f, static_cast<int>(margin_));
  if (source_ == ScaleSource::given) {
    args.pass = Pass::given;
    args.given = inputs[state_].as<const float>();
    return args;
  }
  if (source_ == ScaleSource::amax) {  // known by now
    args.pass = Pass::given;
    args.given = outputs[scale_].as<const float>();
    return args;
  }
  args.pass = Pass::first;
  args.scale = outputs[scale_].as<float>();
  if (source_ == ScaleSource::delayed) {
    args.state = static_cast<ScaleState*>(inputs[state_].data);
  } else {
    args.state = static_cast<ScaleState*>(exec.workspace);
    QUERN_CUDA(cudaMemsetAsync(args.state, 0, sizeof(ScaleState), stream_of(exec)));
  }
  return args;
}

}  // namespace quern::cuda
