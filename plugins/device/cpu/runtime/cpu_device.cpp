#include "runtime/cpu_device.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "products/blas.h"
#include "quantization/fused_quantize.h"
#include "quern/error.h"
#include "runtime/system_limits.h"

namespace quern::cpu {

namespace {

/// Enqueues the closure of one op instance, which lives until it has run, if need be longer than the kernel.
class CpuKernel final : public Kernel {
 public:
  CpuKernel(Launch launch, std::string kind, std::size_t workspace, int threads, Streams& streams)
      : launch_(std::make_shared<const Launch>(std::move(launch))),
        kind_(std::move(kind)),
        workspace_(workspace),
        threads_(threads),
        streams_(streams) {}

  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) const override {
    if (workspace_ > 0 && exec.workspace == nullptr) fail_internal(kind_, "launched without its workspace");
    const int team = streams_.kind(exec.stream) == StreamKind::compute ? threads_ : 1;
    streams_.run(exec.stream, [launch = launch_, in = std::vector<View>(inputs.begin(), inputs.end()),
                               out = std::vector<View>(outputs.begin(), outputs.end()), exec, team] {
      // It belongs to the thread that runs this.
      if (omp_get_max_threads() != team) omp_set_num_threads(team);
      (*launch)(in, out, exec);
    });
  }

 private:
  std::shared_ptr<const Launch> launch_;
  std::string kind_;
  std::size_t workspace_;
  int threads_;
  Streams& streams_;
};

struct VectorUnit {
  const char* name;
  double flops_per_cycle;  ///< fp32, two fused multiply-add pipes
};

VectorUnit vector_unit() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {"AVX-512", 64};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {"AVX2", 32};
  return {"SSE2", 8};
#else
  return {"128-bit vectors", 16};
#endif
}

std::size_t physical_memory() {
  long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  return pages > 0 && page > 0 ? static_cast<std::size_t>(pages) * static_cast<std::size_t>(page) : 0;
}

/// All cores, as far as GEMMs can use them, where no number is asked for.
int thread_count(const CpuOptions& options) {
  if (options.threads > 0) return static_cast<int>(options.threads);
  const int threads = omp_get_max_threads();
  return threads <= omp_get_num_procs() ? std::min(threads, kMostThreads) : threads;
}

std::string units_name(int threads) {
  return std::to_string(threads) + (threads == 1 ? " core, " : " cores, ") + vector_unit().name;
}

// Rates are assumptions for time estimates, not measurements: 2.5 GHz under vector load, 80 % of peak in a GEMM, and
// 10 GB/s a core up to the 100 GB/s of a few memory channels. Every format runs at the fp32 rate, being emulated.
DeviceTraits make_traits(const CpuOptions& options, int threads) {
  const VectorUnit unit = vector_unit();
  DeviceTraits traits;
  traits.id = "cpu";
  traits.name = units_name(threads);
  traits.memory_bytes = options.memory > 0 ? static_cast<std::size_t>(options.memory) << 20 : physical_memory();
  traits.memory_rate = std::min(10e9 * threads, 100e9);
  traits.host_rate = traits.peer_rate = traits.memory_rate / 2;
  for (DType format : {DType::f32, DType::bf16, DType::e4m3, DType::e5m2, DType::i8}) {
    traits.matmul_rates.emplace_back(format, 0.8 * 2.5e9 * unit.flops_per_cycle * threads);
  }
  traits.can_capture = false;
  traits.host_addressable = true;
  return traits;
}

Error resources_error(std::string what, std::string found, std::string next) {
  return Error(ErrorCode::resources, {.where = "device cpu",
                                      .what = std::move(what),
                                      .found = std::move(found),
                                      .expected = {},
                                      .next = std::move(next)});
}

}  // namespace

CpuDevice::CpuDevice(const CpuOptions& options)
    : threads_(thread_count(options)),
      traits_(make_traits(options, threads_)),
      streams_(options.streams == "shuffled" ? Streams::Mode::shuffled : Streams::Mode::threads,
               static_cast<std::uint64_t>(options.shuffle_seed)) {
  for (auto* add :
       {add_matmul_ops, add_conversion_ops, add_quantize_ops, add_quantize_blocks_op, add_embedding_ops, add_norm_ops,
        add_rope_ops, add_attention_ops, add_narrow_matmul_ops, add_stacked_matmul_op, add_elementwise_ops,
        add_reduction_ops, add_loss_ops, add_token_rows_ops, add_optimizer_ops, add_fused_quantize_ops}) {
    add(ops_);
  }
}

std::span<const Fusion> CpuDevice::fusions() const {
  static const std::vector<Fusion> kFusions = [] {
    std::span<const Fusion> quantizing = quantize_fusions();
    std::vector<Fusion> fusions(quantizing.begin(), quantizing.end());
    fusions.insert(
        fusions.end(),
        {
            {"add_rms_norm", "s = add(a, b); y, r = rms_norm(s, w)"},
            {"add_layer_norm", "s = add(a, b); y, m, r = layer_norm(s, w, c)"},
            {"rms_norm_grad_add", "d, dw = rms_norm_grad(dy, x, w, r); g = add(d, e)"},
            {"layer_norm_grad_add", "d, dw, dc = layer_norm_grad(dy, x, w, m, r); g = add(d, e)"},
            {"swiglu_and_grad", "y = swiglu(gu); d = swiglu_grad(dy, gu)"},
            {"head_norm_rope", "y, r = head_norm(x, qw, kw); z = rope(y, p)"},
            {"rope_grad_head_norm_grad", "d = rope_grad(dy, p); dx, dq, dk = head_norm_grad(d, x, qw, kw, r)"},
        });
    return fusions;
  }();
  return kFusions;
}

OpSupport CpuDevice::query(const OpInstance& op) const {
  if (auto added = added_.find(op.kind); added != added_.end()) return support_of(added->second, op);
  auto found = ops_.find(op.kind);
  if (found == ops_.end()) return {"the cpu device has no kernel for the op \"" + op.kind + "\"", 0};
  if (op.inputs.empty() || op.outputs.empty()) return {op.kind + ": without inputs or outputs", 0};
  return found->second.query ? found->second.query(op) : OpSupport{};
}

void CpuDevice::open(int ordinal) {
  if (ordinal != 0)
    throw resources_error("no such unit", std::to_string(ordinal), "the cpu device has unit 0 only, which ranks share");
  if (threads_ > kMostThreads)
    throw resources_error("too many threads in OMP_NUM_THREADS", std::to_string(threads_),
                          "set it, or device.cpu.threads, to " + std::to_string(kMostThreads) + " at most");
  check_address_space(threads_);
  load_blas(threads_ + kOtherStreams);
  traits_.name = units_name(threads_) + ", " + blas_name();
  if (const std::string warning = blas_warning(); !warning.empty()) traits_.warnings = {warning};
  check_threads(threads_);
  // The team belongs to the thread that starts it: the compute stream's.
  std::size_t stack = 0;
  const Stream compute = stream(StreamKind::compute);
  streams_.run(compute, [&stack, team = threads_] { stack = least_stack(team); });
  streams_.synchronize(compute);
  check_stack(stack);
}

std::string CpuDevice::save_state() const {
  return R"({"blas": ")" + blas_name() + R"(", "vectors": ")" + vector_unit().name + "\"}";
}

std::unique_ptr<Kernel> CpuDevice::prepare(const OpInstance& op) {
  if (auto added = added_.find(op.kind); added != added_.end()) {
    Launch launch = [kernel = std::shared_ptr<Kernel>(added->second.factory(op))](
                        std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
      kernel->launch(inputs, outputs, exec);
    };
    return std::make_unique<CpuKernel>(std::move(launch), op.kind, support_of(added->second, op).workspace_bytes,
                                       threads_, streams_);
  }
  OpSupport support = query(op);
  if (!support.refusal.empty()) {
    throw Error(ErrorCode::config, {.where = "device cpu",
                                    .what = support.refusal,
                                    .found = {},
                                    .expected = {},
                                    .next = "choose another precision or model, or add a kernel for it in a plugin"});
  }
  return std::make_unique<CpuKernel>(ops_.find(op.kind)->second.prepare(op), op.kind, support.workspace_bytes, threads_,
                                     streams_);
}

void* CpuDevice::allocate(MemoryKind kind, std::size_t bytes) {
  const std::size_t alignment = traits_.alignment, limit = traits_.memory_bytes;
  void* memory = nullptr;
  // The system would promise more memory than there is and end the process when it is touched.
  if (limit == 0 || bytes <= limit) {
    std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    memory = kind == MemoryKind::device ? memory_.allocate(std::max(rounded, alignment))
                                        : std::aligned_alloc(alignment, std::max(rounded, alignment));
  }
  if (memory == nullptr) {
    throw resources_error("out of memory",
                          "a request for " + std::to_string(bytes) + " bytes of " + std::to_string(limit),
                          "use a smaller micro-batch or model, or free memory");
  }
  return memory;
}

void CpuDevice::release(MemoryKind kind, void* memory) noexcept {
  streams_.drain();
  if (kind == MemoryKind::device)
    memory_.release(memory);
  else
    std::free(memory);
}

SharedHandle CpuDevice::export_memory(void* memory) {
  streams_.drain();
  return memory_.share(memory);
}

void CpuDevice::release_imported(void* memory) noexcept {
  streams_.drain();
  memory_.release_imported(memory);
}

void CpuDevice::copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  if (bytes > 0) streams_.run(stream, [=] { std::memmove(to, from, bytes); });
}

void CpuDevice::fill(void* to, std::uint8_t byte, std::size_t bytes, Stream stream) {
  if (bytes > 0) streams_.run(stream, [=] { std::memset(to, byte, bytes); });
}

std::unique_ptr<Graph> CpuDevice::capture(Stream, const std::function<void()>&) {
  fail_internal("device cpu", "capture was asked for, but traits().can_capture is false: run the work directly");
}

}  // namespace quern::cpu
