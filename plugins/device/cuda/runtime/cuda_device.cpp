#include "runtime/cuda_device.h"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <cctype>
#include <exception>
#include <fstream>
#include <vector>

#include "products/library/matmul_plan.h"
#include "quantization/quantize_ops.h"
#include "quern/error.h"
#include "runtime/built_code.h"
#include "runtime/check.h"
#include "runtime/driver.h"
#include "runtime/hopper_kernels.h"
#include "runtime/launch_seconds.h"

namespace quern::cuda {

namespace {

/// Runs the closure of one op instance.
class CudaKernel final : public Kernel {
 public:
  CudaKernel(Launch launch, std::string kind, std::size_t workspace)
      : launch_(std::move(launch)), kind_(std::move(kind)), workspace_(workspace) {}

  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) const override {
    if (workspace_ > 0 && exec.workspace == nullptr) fail_internal(kind_, "launched without its workspace");
    launch_(inputs, outputs, exec);
  }

 private:
  Launch launch_;
  std::string kind_;
  std::size_t workspace_;
};

class CudaGraph final : public Graph {
 public:
  explicit CudaGraph(cudaGraphExec_t graph) : graph_(graph) {}
  ~CudaGraph() override { cudaGraphExecDestroy(graph_); }
  void launch(Stream stream) override { QUERN_CUDA(cudaGraphLaunch(graph_, static_cast<cudaStream_t>(stream.handle))); }

 private:
  cudaGraphExec_t graph_;
};

Error resources_error(std::string what, std::string found, std::string expected, std::string next) {
  return Error(ErrorCode::resources, {.where = "device cuda",
                                      .what = std::move(what),
                                      .found = std::move(found),
                                      .expected = std::move(expected),
                                      .next = std::move(next)});
}

/// GPUs here, or 0 with the reason.
struct UnitCount {
  int count = 0;
  std::string reason;
};

UnitCount count_units() {
  UnitCount units;
  cudaError_t status = cudaGetDeviceCount(&units.count);
  if (status == cudaSuccess) {
    if (units.count == 0) units.reason = "no GPU";
    return units;
  }
  cudaGetLastError();  // an absent driver is an answer here, not an error to be found later
  return {0, std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")"};
}

GpuFacts planned_facts(const CudaOptions& options) {
  GpuFacts facts;
  const int units = count_units().count;
  if (options.assume == "auto") {
    facts = units > 0 ? facts_of_unit(0) : facts_of(gpu_models().front());
  } else {
    for (const GpuModel& model : gpu_models())
      if (model.id == options.assume) facts = facts_of(model);
  }
  facts.cuda.attention = options.attention == "auto"    ? AttentionChoice::automatic
                         : options.attention == "cudnn" ? AttentionChoice::cudnn
                                                        : AttentionChoice::own;
  facts.cuda.products = options.products == "auto"  ? ProductChoice::automatic
                        : options.products == "own" ? ProductChoice::own
                                                    : ProductChoice::library;
  facts.cuda.wgmma = facts.cuda.compute_capability == 90 && has_hopper_kernels();
  facts.device.units = std::max(units, 1);
  if (options.memory > 0) facts.device.memory_bytes = static_cast<std::size_t>(options.memory) << 20;
  return facts;
}

void check_work(cudaError_t status) {
  if (status == cudaSuccess) return;
  throw resources_error("work on the GPU failed",
                        std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")", {},
                        "run with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer to find the kernel");
}

/// The driver's error codes agree with the runtime's where both have one.
void check_driver(CUresult status) { QUERN_CUDA(static_cast<cudaError_t>(status)); }

/// -1: the system does not say.
int numa_node_of(std::string bus_id) {
  for (char& letter : bus_id) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  int node = -1;
  std::ifstream("/sys/bus/pci/devices/" + bus_id + "/numa_node") >> node;
  return std::max(node, -1);
}

cudaStream_t as_stream(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t as_event(Event event) { return static_cast<cudaEvent_t>(event.handle); }

}  // namespace

CudaDevice::CudaDevice(const CudaOptions& options) : options_(options), facts_(planned_facts(options)) {
  for (auto* add : {add_matmul_ops, add_stacked_matmul_op, add_narrow_matmul_ops, add_conversion_ops, add_quantize_ops,
                    add_embedding_ops, add_norm_ops, add_rope_ops, add_attention_ops, add_elementwise_ops, add_loss_ops,
                    add_token_rows_ops, add_optimizer_ops}) {
    add(ops_);
  }
  if (has_hopper_kernels()) hopper_kernels().add_ops(ops_);
}

CudaDevice::~CudaDevice() { close(); }

// ---- capabilities ----

std::span<const Fusion> CudaDevice::fusions() const {
  static const std::vector<Fusion> kFusions = [] {
    std::vector<Fusion> fusions{
        // longer ones first
        {"matmul_swiglu_quantize_delayed",
         "y = matmul(a, b, _, sa, sb); s = swiglu(y); q, sc, t = quantize_delayed(s, st)"},
        {"matmul_swiglu_grad_quantize_delayed",
         "d = matmul(a, b, _, sa, sb); g = swiglu_grad(d, gu); q, sc, t = quantize_delayed(g, st)"},
        {"matmul_swiglu_quantize_squares",
         "y = matmul(a, b, _, sa, sb); s = swiglu(y); q, sr, t, sc = quantize_squares(s)"},
        {"matmul_swiglu_grad_quantize_squares",
         "d = matmul(a, b, _, sa, sb); g = swiglu_grad(d, gu); q, sr, t, sc = quantize_squares(g)"},
        {"matmul_swiglu_quantize_blocks",
         "y = matmul(a, b, _, sa, sb); s = swiglu(y); q, sr, t, sc = quantize_blocks(s)"},
        {"matmul_swiglu_grad_quantize_blocks",
         "d = matmul(a, b, _, sa, sb); g = swiglu_grad(d, gu); q, sr, t, sc = quantize_blocks(g)"}};
    const std::vector<Fusion> quantizing = quantize_fusions();
    fusions.insert(fusions.end(), quantizing.begin(), quantizing.end());
    fusions.insert(
        fusions.end(),
        {{"add_rms_norm", "s = add(a, b); y, r = rms_norm(s, w)"},
         {"add_layer_norm", "s = add(a, b); y, m, r = layer_norm(s, w, c)"},
         {"rms_norm_grad_add", "d, dw = rms_norm_grad(dy, x, w, r); g = add(d, e)"},
         {"layer_norm_grad_add", "d, dw, dc = layer_norm_grad(dy, x, w, m, r); g = add(d, e)"},
         {"matmul_swiglu", "y = matmul(a, b); s = swiglu(y)"},
         {"matmul_swiglu_and_grad", "d = matmul(a, b); y = swiglu(gu); g = swiglu_grad(d, gu)"},
         {"matmul_swiglu_grad", "d = matmul(a, b); g = swiglu_grad(d, gu)"},
         {"swiglu_and_grad", "y = swiglu(gu); d = swiglu_grad(dy, gu)"},
         {"rope_grad_column_sum", "d = rope_grad(dy, p); s = column_sum(d)"},
         {"head_norm_rope", "y, r = head_norm(x, qw, kw); z = rope(y, p)"},
         {"rope_grad_head_norm_grad", "d = rope_grad(dy, p); dx, dq, dk = head_norm_grad(d, x, qw, kw, r)"}});
    return fusions;
  }();
  return kFusions;
}

OpSupport CudaDevice::query(const OpInstance& op) const {
  if (auto added = added_.find(op.kind); added != added_.end()) return support_of(added->second, op);
  auto found = ops_.find(op.kind);
  if (found == ops_.end()) return {"the cuda device has no kernel for the op \"" + op.kind + "\"", 0};
  OpSupport support = found->second.query ? found->second.query(op, facts_.cuda) : OpSupport{};
  if (!support.refusal.empty()) return support;
  const double fast = launch_seconds(op, facts_);
  support.seconds = support.slow.empty() ? fast : slow_launch_seconds(op, facts_);
  if (!support.slow.empty()) support.fast_seconds = fast;
  return support;
}

// ---- set-up ----

void CudaDevice::open(int ordinal) {
  if (ordinal_ >= 0) fail_internal("device cuda", "opened twice");
  UnitCount units = count_units();
  if (units.count == 0)
    throw resources_error("no NVIDIA GPU can be used", units.reason, "a GPU and its driver",
                          "run on a machine with a GPU, or choose [device] id = \"cpu\"");
  if (ordinal < 0 || ordinal >= units.count)
    throw resources_error("no such GPU", std::to_string(ordinal), "0 to " + std::to_string(units.count - 1),
                          "start as many ranks as there are GPUs, or set CUDA_VISIBLE_DEVICES");
  GpuFacts here = facts_of_unit(ordinal);
  if (here.cuda.compute_capability != facts_.cuda.compute_capability ||
      here.cuda.multiprocessors != facts_.cuda.multiprocessors)
    throw resources_error("the plan is for another GPU", here.device.name, facts_.device.name,
                          "leave device.cuda.assume at \"auto\" to train");
  if (here.cuda.compute_capability < 80)
    throw resources_error("GPU too old", here.device.name, "compute capability 8.0 (Ampere) or later", {});
  QUERN_CUDA(cudaSetDevice(ordinal));
  const std::string of_gpu = here.device.name + ", compute capability " + std::to_string(here.cuda.compute_capability);
  const std::string build_again =
      "build again with -DQUERN_CUDA_ARCHITECTURES=" + std::to_string(here.cuda.compute_capability) +
      (here.cuda.compute_capability == 90 ? "a" : "");
  if (const std::string built_for = missing_code(); !built_for.empty())
    throw resources_error("this build has no code for the GPU", of_gpu, "one of " + built_for, build_again);
  if (is_compiled_by_driver())
    facts_.device.warnings.push_back("this build has only PTX for the GPU (" + of_gpu +
                                     "): the driver compiles kernels at "
                                     "the first start, which takes a minute or more once; " +
                                     build_again);
  ordinal_ = ordinal;
  facts_.device.numa_node = numa_node_of(bus_id());
  facts_.device.unit = here.device.unit;
  memory_ = std::make_unique<ShareableMemory>(ordinal);
  int lowest = 0, highest = 0;
  QUERN_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  for (StreamKind kind : {StreamKind::compute, StreamKind::copy_in, StreamKind::copy_out, StreamKind::communication}) {
    // Transfers are short to launch and long to wait for: they go first when both could run.
    QUERN_CUDA(cudaStreamCreateWithPriority(&streams_[static_cast<std::size_t>(kind)], cudaStreamNonBlocking,
                                            kind == StreamKind::compute ? lowest : highest));
  }
  context_.traits = facts_.cuda;
  context_.multiprocessors = facts_.cuda.multiprocessors;
  QUERN_CUDA(cudaStreamCreateWithFlags(&context_.setup, cudaStreamNonBlocking));
  QUERN_CUBLAS(cublasLtCreate(&context_.lt));
  if (facts_.cuda.attention != AttentionChoice::own) QUERN_CUDNN(cudnnCreate(&context_.dnn));
  choices_ = std::make_unique<TimedChoices>(here.device.name,
                                            options_.matmul_cache ? TimedChoices::cache_file() : std::string());
  plans_ = std::make_unique<MatmulPlans>(*choices_, static_cast<int>(options_.matmul_candidates),
                                         options_.matmul_search == "wide" ? MatmulSearch::wide : MatmulSearch::listed);
  context_.choices = choices_.get();
  context_.plans = plans_.get();
  context_.note = [this](const std::string& text) {
    std::vector<std::string>& warnings = facts_.device.warnings;
    if (std::find(warnings.begin(), warnings.end(), text) == warnings.end()) warnings.push_back(text);
  };
  context_.constant = [this](const void* host, std::size_t bytes) { return make_constant(host, bytes); };
}

void CudaDevice::close() noexcept {
  if (ordinal_ < 0) return;
  cudaSetDevice(ordinal_);
  cudaDeviceSynchronize();
  for (void* constant : constants_) memory_->release(constant);
  memory_.reset();
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
  if (context_.dnn != nullptr) cudnnDestroy(context_.dnn);
  if (context_.lt != nullptr) cublasLtDestroy(context_.lt);
  if (context_.setup != nullptr) cudaStreamDestroy(context_.setup);
  for (cudaStream_t stream : streams_)
    if (stream != nullptr) cudaStreamDestroy(stream);
}

void CudaDevice::need_open(const char* what) const {
  if (ordinal_ < 0) fail_internal("device cuda", std::string(what) + " before open");
}

std::string CudaDevice::bus_id() const {
  char text[32] = {};
  QUERN_CUDA(cudaDeviceGetPCIBusId(text, sizeof text, ordinal_));
  return text;
}

std::unique_ptr<Kernel> CudaDevice::prepare(const OpInstance& op) {
  need_open("prepare");
  if (auto added = added_.find(op.kind); added != added_.end()) return added->second.factory(op);
  OpSupport support = query(op);
  if (!support.refusal.empty()) {
    throw Error(ErrorCode::config, {.where = "device cuda",
                                    .what = support.refusal,
                                    .found = {},
                                    .expected = {},
                                    .next = "choose another precision or model, or add a kernel for it in a plugin"});
  }
  return std::make_unique<CudaKernel>(ops_.find(op.kind)->second.prepare(op, context_), op.kind,
                                      support.workspace_bytes);
}

void* CudaDevice::make_constant(const void* host, std::size_t bytes) {
  void* memory = allocate(MemoryKind::device, bytes);
  constants_.push_back(memory);
  QUERN_CUDA(cudaMemcpyAsync(memory, host, bytes, cudaMemcpyHostToDevice, context_.setup));
  QUERN_CUDA(cudaStreamSynchronize(context_.setup));
  return memory;
}

void* CudaDevice::allocate(MemoryKind kind, std::size_t bytes) {
  need_open("allocate");
  void* memory = nullptr;
  if (bytes == 0) bytes = 1;
  const unsigned more = kind == MemoryKind::mapped           ? cudaHostAllocMapped
                        : kind == MemoryKind::write_combined ? cudaHostAllocWriteCombined
                                                             : 0;
  cudaError_t status = kind == MemoryKind::device ? memory_->allocate(&memory, bytes)
                                                  : cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | more);
  if (status == cudaSuccess) return memory;
  cudaGetLastError();
  std::size_t free_bytes = 0, total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  bool device = kind == MemoryKind::device;
  throw resources_error(
      device ? "out of device memory" : "no more pinned host memory",
      "a request for " + std::to_string(bytes) + " bytes, " + cudaGetErrorName(status),
      device ? std::to_string(free_bytes) + " bytes are free of " + std::to_string(total_bytes) : std::string(),
      device ? "end other programs on this GPU, or set memory.device_budget"
             : "offload less, or raise the limit of locked memory");
}

void CudaDevice::release(MemoryKind kind, void* memory) noexcept {
  if (memory == nullptr) return;
  if (kind == MemoryKind::device)
    memory_->release(memory);
  else
    cudaFreeHost(memory);
}

SharedHandle CudaDevice::export_memory(void* memory) {
  need_open("export_memory");
  return memory_->share(memory);
}

void* CudaDevice::import_memory(const SharedHandle& handle) {
  need_open("import_memory");
  return memory_->map(handle);
}

void CudaDevice::release_imported(void* memory) noexcept { memory_->unmap(memory); }

void CudaDevice::pin(void* memory, std::size_t bytes) {
  need_open("pin");
  const cudaError_t status = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw resources_error("host memory cannot be pinned", std::to_string(bytes) + " bytes, " + cudaGetErrorName(status),
                        {}, "offload less, or raise the limit of locked memory");
}

void CudaDevice::unpin(void* memory) noexcept {
  cudaDeviceSynchronize();
  cudaHostUnregister(memory);
}

Stream CudaDevice::stream(StreamKind kind) {
  need_open("stream");
  return {streams_[static_cast<std::size_t>(kind)]};
}

Event CudaDevice::make_event() {
  need_open("make_event");
  cudaEvent_t event = nullptr;
  QUERN_CUDA(cudaEventCreate(&event));
  events_.push_back(event);
  return {event};
}

// ---- hot path ----

void CudaDevice::copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  if (bytes > 0) QUERN_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream)));
}

void CudaDevice::fill(void* to, std::uint8_t byte, std::size_t bytes, Stream stream) {
  if (bytes > 0) QUERN_CUDA(cudaMemsetAsync(to, byte, bytes, as_stream(stream)));
}

void CudaDevice::call(std::function<void()> work, Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  QUERN_CUDA(cudaStreamIsCapturing(as_stream(stream), &status));
  if (status != cudaStreamCaptureStatusNone) fail_internal("device cuda", "work of the host cannot be captured");
  auto held = std::make_unique<std::function<void()>>(std::move(work));
  auto run = [](void* memory) {
    (*std::unique_ptr<std::function<void()>>(static_cast<std::function<void()>*>(memory)))();
  };
  QUERN_CUDA(cudaLaunchHostFunc(as_stream(stream), run, held.get()));
  held.release();
}

void CudaDevice::record(Event event, Stream stream) { QUERN_CUDA(cudaEventRecord(as_event(event), as_stream(stream))); }

void CudaDevice::wait(Stream stream, Event event) {
  QUERN_CUDA(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0));
}

void CudaDevice::write_word(std::uint32_t* word, std::uint32_t value, Stream stream) {
  static const auto kWrite = driver_function<decltype(&::cuStreamWriteValue32)>("cuStreamWriteValue32");
  check_driver(kWrite(as_stream(stream), reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT));
}

void CudaDevice::wait_word(const std::uint32_t* word, std::uint32_t mask, Stream stream) {
  static const auto kWait = driver_function<decltype(&::cuStreamWaitValue32)>("cuStreamWaitValue32");
  check_driver(kWait(as_stream(stream), reinterpret_cast<CUdeviceptr>(word), mask, CU_STREAM_WAIT_VALUE_AND));
}

void CudaDevice::synchronize(Stream stream) {
  need_open("synchronize");
  check_work(cudaStreamSynchronize(as_stream(stream)));
}

void CudaDevice::synchronize(Event event) { check_work(cudaEventSynchronize(as_event(event))); }

// Relaxed mode: a kernel's code may be loaded at its first launch, which is harmless, but which stricter modes refuse.
std::unique_ptr<Graph> CudaDevice::capture(Stream stream, const std::function<void()>& work) {
  need_open("capture");
  QUERN_CUDA(cudaStreamBeginCapture(as_stream(stream), cudaStreamCaptureModeRelaxed));
  std::exception_ptr thrown;
  try {
    work();
  } catch (...) {
    thrown = std::current_exception();
  }
  cudaGraph_t graph = nullptr;
  cudaError_t status = cudaStreamEndCapture(as_stream(stream), &graph);
  if (thrown) {
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
    std::rethrow_exception(thrown);
  }
  QUERN_CUDA(status);
  cudaGraphExec_t instance = nullptr;
  status = cudaGraphInstantiate(&instance, graph, 0);
  cudaGraphDestroy(graph);
  QUERN_CUDA(status);
  auto result = std::make_unique<CudaGraph>(instance);
  QUERN_CUDA(cudaGraphUpload(instance, as_stream(stream)));
  return result;
}

double CudaDevice::elapsed(Event from, Event to) {
  float milliseconds = 0;
  QUERN_CUDA(cudaEventElapsedTime(&milliseconds, as_event(from), as_event(to)));
  return milliseconds;
}

// ---- observation ----

Telemetry CudaDevice::telemetry() {
  need_open("telemetry");
  if (!telemetry_) telemetry_ = std::make_unique<GpuTelemetry>(bus_id());
  return telemetry_->read();
}

void CudaDevice::begin_range(const char* name) { nvtxRangePushA(name); }
void CudaDevice::end_range() { nvtxRangePop(); }

// ---- state ----

std::string CudaDevice::save_state() const {
  need_open("save_state");
  return choices_->save();
}

void CudaDevice::load_state(std::string_view state) {
  need_open("load_state");
  choices_->load(state);
  plans_->adopt();
}

}  // namespace quern::cuda
