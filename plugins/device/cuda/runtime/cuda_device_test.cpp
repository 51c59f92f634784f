// The device itself: what plan mode answers without a GPU, and memory, streams, events and capture with one.
#include "runtime/cuda_device.h"
#include "runtime/built_code.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "plugin/plugin_host.h"
#include "program/passes/fuse.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"
#include "runtime/hopper_kernels.h"
#include "test_paths.h"
#include "tests/device_pair.h"

using namespace quern;
using namespace quern::cuda;

namespace {

CudaDevice assumed(const std::string& gpu) {
  CudaOptions options;
  options.assume = gpu;
  return CudaDevice(options);
}

OpInstance matmul(DType in, DType out, std::int64_t transpose_b = 1) {
  OpInstance op;
  op.kind = "matmul";
  op.inputs = {{in, {64, 32}, true, false}, {in, transpose_b ? Extents{48, 32} : Extents{32, 48}, true, false}};
  op.outputs = {{out, {64, 48}, true, false}};
  op.attributes = {{"transpose_b", transpose_b}};
  return op;
}

}  // namespace

TEST_CASE("plan mode knows GPUs by name, without one") {
  CudaDevice h100 = assumed("H100"), h200 = assumed("H200"), rtx4090 = assumed("RTX-4090");
  CHECK(h100.traits().id == "cuda");
  CHECK(h100.traits().can_capture);
  CHECK_FALSE(h100.traits().host_addressable);
  const std::map<DType, double> rates(h100.traits().matmul_rates.begin(), h100.traits().matmul_rates.end());
  CHECK(rates.at(DType::bf16) == 989.4e12);
  CHECK(rates.at(DType::e4m3) == 1978.9e12);
  CHECK(h100.traits().memory_rate == 3.35e12);
  CHECK(h200.traits().memory_rate == 4.8e12);
  CHECK(h100.traits().memory_bytes > (std::size_t{75} << 30));
  CHECK(h100.traits().memory_bytes < (std::size_t{80} << 30));
  CHECK(rtx4090.traits().memory_bytes < (std::size_t{24} << 30));
}

TEST_CASE("the driver's whole product name finds its row of the table, or none") {
  struct Product {
    const char* name;
    int multiprocessors;
    double gib;
    const char* id;
  };
  for (const Product& product :
       {Product{"NVIDIA H100 80GB HBM3", 132, 79.2, "H100"},
        {"NVIDIA H100 PCIe", 114, 79.2, "H100-PCIe"},
        {"NVIDIA H200", 132, 139.8, "H200"},
        {"NVIDIA H200 NVL", 132, 139.8, "H200-NVL"},
        {"NVIDIA H20", 78, 95, "H20"},
        {"NVIDIA GH200 480GB", 132, 94.5, "GH200"},
        {"NVIDIA B200", 148, 178.4, "B200"},
        {"NVIDIA B300 SXM6 AC", 148, 268, "B300"},
        {"NVIDIA A100-SXM4-80GB", 108, 79.2, "A100"},
        {"NVIDIA A100-SXM4-40GB", 108, 39.4, "A100-40GB"},
        {"NVIDIA A100 80GB PCIe", 108, 79.2, "A100-PCIe"},
        {"NVIDIA A100-PCIE-40GB", 108, 39.4, "A100-PCIe-40GB"},
        {"NVIDIA A10", 72, 22, "A10"},
        {"NVIDIA A10G", 80, 22, "A10G"},
        {"NVIDIA L4", 58, 22, "L4"},
        {"NVIDIA L40", 142, 44.4, "L40"},
        {"NVIDIA L40S", 142, 44.4, "L40S"},
        {"NVIDIA RTX A6000", 84, 47.4, "RTX-A6000"},
        {"NVIDIA RTX 6000 Ada Generation", 142, 47.4, "RTX-6000-Ada"},
        {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 95, "RTX-PRO-6000"},
        {"NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 95, "RTX-PRO-6000-Server"},
        {"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 188, 95, "RTX-PRO-6000-Max-Q"},
        {"NVIDIA GeForce RTX 3080", 68, 9.6, "RTX-3080"},
        {"NVIDIA GeForce RTX 3080", 70, 11.6, "RTX-3080-12GB"},
        {"NVIDIA GeForce RTX 4060 Ti", 34, 15.6, "RTX-4060-Ti-16GB"},
        {"NVIDIA GeForce RTX 4060 Ti", 34, 7.6, "RTX-4060-Ti-8GB"},
        {"NVIDIA GeForce RTX 4070 Ti", 60, 11.6, "RTX-4070-Ti"},
        {"NVIDIA GeForce RTX 4070 Ti SUPER", 66, 15.6, "RTX-4070-Ti-Super"},
        {"NVIDIA GeForce RTX 4090", 128, 23.5, "RTX-4090"},
        {"NVIDIA GeForce RTX 4090 Laptop GPU", 76, 15.6, "RTX-4090-Laptop"},
        {"NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 39, "none"},
        {"NVIDIA H100 80GB HBM3", 60, 39, "none"},
        {"NVIDIA GeForce RTX 4090 Ti", 142, 23.5, "none"},
        {"NVIDIA L400", 58, 22, "none"},
        {"NVIDIA GeForce GTX 1080", 20, 8, "none"}}) {
    CAPTURE(product.name);
    const GpuModel* model = gpu_model(product.name, product.multiprocessors, product.gib);
    CHECK(std::string(model ? model->id : "none") == product.id);
  }
}

TEST_CASE("each row of the table has its own id, and the rates that its data sheet states") {
  std::set<std::string_view> ids;
  auto rate = [](const char* id, DType format) {
    for (const GpuModel& model : gpu_models())
      if (model.id == id)
        for (const auto& [known, rate] : facts_of(model).device.matmul_rates)
          if (known == format) return rate / 1e12;
    return 0.0;
  };
  for (const GpuModel& model : gpu_models()) {
    CAPTURE(model.id);
    CHECK(ids.insert(model.id).second);
    CHECK(model.bf16 > model.f32);
    CHECK(model.host_rate > 10);
    CHECK(facts_of(model).device.memory_bytes < (static_cast<std::size_t>(model.memory_gib) + 1) << 30);
  }
  struct Sheet {
    const char* id;
    double f32, bf16, fp8, int8;
  };
  for (const Sheet& sheet :
       {Sheet{"RTX-4090", 82.6, 165.2, 330.3, 660.6},  // fp8 with fp32 accumulators, half of fp16's
        {"RTX-5090", 104.8, 209.5, 419, 838},
        {"RTX-3090", 35.6, 71, 0, 284},
        {"RTX-6000-Ada", 91.1, 364.2, 728.5, 728.5},
        {"RTX-PRO-6000", 126, 503.8, 1007.6, 1007.6},
        {"RTX-A6000", 38.7, 154.8, 0, 309.7},
        {"A100", 19.5, 312, 0, 624},
        {"L4", 30.3, 121, 242, 242},
        {"L40", 90.5, 181, 362, 362},
        {"A10G", 35, 70, 0, 140},
        {"H20", 44, 148, 296, 296}}) {
    CAPTURE(sheet.id);
    for (const auto& [format, peak] : {std::pair{DType::f32, sheet.f32},
                                       {DType::bf16, sheet.bf16},
                                       {DType::e4m3, sheet.fp8},
                                       {DType::i8, sheet.int8}})
      CHECK(rate(sheet.id, format) == doctest::Approx(peak).epsilon(0.01));
  }
}

TEST_CASE("a GPU that the table does not have is estimated from its own properties") {
  GpuFacts facts;
  auto rate = [&](DType format) {
    for (const auto& [known, rate] : facts.device.matmul_rates)
      if (known == format) return rate;
    return 0.0;
  };
  estimate_rates({"NVIDIA GeForce RTX 4050 Laptop GPU", 89, 20, 5.6, 2.37e9, 192e9}, facts);
  CHECK(rate(DType::bf16) == doctest::Approx(20 * 2.37e9 * 512));
  CHECK(rate(DType::e4m3) == doctest::Approx(20 * 2.37e9 * 1024));
  CHECK(facts.device.memory_rate == 192e9);
  estimate_rates({"NVIDIA RTX 2000 Ada Generation", 89, 22, 15.6, 2.13e9, 224e9}, facts);
  CHECK(rate(DType::bf16) == doctest::Approx(22 * 2.13e9 * 1024));
  estimate_rates({"NVIDIA RTX A2000", 86, 26, 5.6, 1.2e9, 288e9}, facts);
  CHECK(rate(DType::e4m3) == 0);
}

TEST_CASE("attention on CUDA cores says so, with the reason and what it costs") {
  auto attention = [](DType dtype, std::int64_t sequence, std::int64_t head_dim, bool documents, bool gradient,
                      std::int64_t window) {
    constexpr std::int64_t kHeads = 4;
    const std::int64_t width = kHeads * head_dim, tokens = 2 * sequence;
    const Operand packed{dtype, {tokens, 3 * width}, true, false}, out{dtype, {tokens, width}, true, false},
        stats{DType::f32, {tokens, kHeads}, true, false};
    OpInstance op{.kind = gradient ? "attention_grad" : "attention",
                  .inputs = gradient ? std::vector<Operand>{out, packed, out, stats} : std::vector<Operand>{packed},
                  .outputs = gradient ? std::vector<Operand>{packed} : std::vector<Operand>{out, stats},
                  .attributes = {{"heads", kHeads},
                                 {"kv_heads", kHeads},
                                 {"head_dim", head_dim},
                                 {"mask", std::string("causal")},
                                 {"scale", 0.125}},
                  .geometry = {2, sequence}};
    if (documents) op.inputs.push_back({DType::i32, {tokens + 1}, true, false});
    if (window > 0) op.attributes.set("window", window);
    return op;
  };
  CudaOptions own;
  own.attention = "own";
  const CudaDevice h100 = assumed("H100"), rtx4090 = assumed("RTX-4090"), by_own(own);
  const std::string on = "attention on CUDA cores, not tensor cores, as ";
  struct Case {
    const CudaDevice& device;
    DType dtype;
    std::int64_t sequence, head_dim;
    bool documents;
    std::string slow;
    std::int64_t window = 0;
  };
  for (const bool gradient : {false, true})
    for (const Case& c :
         {Case{h100, DType::bf16, 1024, 192, false, ""},
          {rtx4090, DType::bf16, 1024, 128, true, ""},
          {rtx4090, DType::bf16, 1024, 192, false,
           on + "cuDNN does not take bf16 heads of 192 in sequences of 1024 (compute capability 8.9)"},
          {h100, DType::f32, 1024, 64, false,
           on + "cuDNN does not take f32 heads of 64 in sequences of 1024 (compute capability 9.0)"},
          {h100, DType::bf16, 1020, 80, true,
           on + "cuDNN does not take bf16 heads of 80 in sequences of 1020 with documents (compute capability 9.0)"},
          {h100, DType::bf16, 32768, 80, true,
           on + "cuDNN does not take bf16 heads of 80 in sequences of 32768 with documents (compute capability 9.0)"},
          {rtx4090, DType::bf16, 1024, 128, false, "", 256},
          {h100, DType::bf16, 1020, 80, false, "", 256},
          {rtx4090, DType::bf16, 1024, 192, false,
           on + "cuDNN does not take bf16 heads of 192 in sequences of 1024 with windows (compute capability 8.9)",
           256},
          {by_own, DType::bf16, 1024, 64, false, on + "device.cuda.attention is \"own\""}}) {
      CAPTURE(c.slow);
      const OpSupport support =
          c.device.query(attention(c.dtype, c.sequence, c.head_dim, c.documents, gradient, c.window));
      CHECK(support.refusal == "");
      CHECK(support.slow == c.slow);
      CHECK(support.seconds > 0);
      if (!c.slow.empty()) CHECK(support.seconds > 4 * support.fast_seconds);
    }
}

TEST_CASE("queries answer at plan time, with the reason for a refusal") {
  CudaDevice h100 = assumed("H100"), a100 = assumed("A100");
  CHECK(h100.query(matmul(DType::bf16, DType::bf16)).refusal == "");
  CHECK(h100.query(matmul(DType::bf16, DType::bf16)).workspace_bytes > 0);
  CHECK(h100.query(matmul(DType::e4m3, DType::bf16)).refusal == "");
  CHECK(a100.query(matmul(DType::e4m3, DType::bf16)).refusal ==
        "matmul: e4m3 times e4m3: needs compute capability 8.9 (Ada) or later");
  CHECK(h100.query(matmul(DType::e4m3, DType::bf16, 0)).refusal ==
        std::string("matmul: e4m3 times e4m3: contracted dimensions must come last (transpose_a 0, transpose_b 1); ") +
            (has_hopper_kernels() ? "own GEMMs of floats accumulate in fewer bits than fp32 unless a is not K-major"
                                  : "own GEMMs need compute capability 9.0 (Hopper) and its code in this build"));
  CHECK(h100.query(matmul(DType::e5m2, DType::bf16)).refusal ==
        "matmul: e5m2 times e5m2: at most one operand can be e5m2");
  OpInstance blocks = matmul(DType::e4m3, DType::bf16);
  blocks.attributes.set("scale_rows_b", std::int64_t{1});
  CHECK(assumed("L40S").query(blocks).refusal == "matmul: block scales need compute capability 9.0 (Hopper)");
  CHECK(h100.query(matmul(DType::f32, DType::bf16)).refusal == "matmul: f32 times f32 gives f32 only on this device");
  OpInstance unknown;
  unknown.kind = "convolution";
  CHECK(h100.query(unknown).refusal == "the cuda device has no kernel for the op \"convolution\"");
}

TEST_CASE("int8 is quantized to and multiplied on every GPU, as docs/precision.md says") {
  const CudaDevice h100 = assumed("H100"), a100 = assumed("A100");
  for (const CudaDevice* device : {&h100, &a100}) {
    CHECK(device->query(matmul(DType::i8, DType::bf16)).refusal == "");
    CHECK(device->query(matmul(DType::i8, DType::f32)).refusal ==
          "matmul: i8 times i8 gives bf16 on this device, gradients too (optimizer.gradient = \"bf16\")");
    OpInstance op;
    op.kind = "quantize_rows";
    op.inputs = {{DType::bf16, {64, 32}, true, false}};
    op.outputs = {{DType::i8, {64, 32}, true, false}, {DType::f32, {64}, true, false}};
    op.attributes = {{"format", std::string("i8")}};
    CHECK(device->query(op).refusal == "");
    op.kind = "quantize_blocks";
    op.outputs.resize(4);
    CHECK(device->query(op).refusal.find("needs a format e4m3 or e5m2") != std::string::npos);
  }
}

TEST_CASE("the plugin loads and plans without a driver") {
  PluginHost host({std::filesystem::path(QUERN_BUILD_DIR) / "plugins"});
  const Factory& factory = host.require("device", "cuda");
  OptionValues values = default_values(factory.options);
  values.set("assume", OptionValue(std::string("H200")));
  std::unique_ptr<Device> device = host.create<Device>("cuda", values);
  CHECK(device->traits().name == "NVIDIA H200 (assumed)");
  CHECK(device->query(matmul(DType::bf16, DType::bf16)).refusal == "");
  OpSet ops = builtin_ops();
  std::vector<FusionPattern> patterns = add_fusions(ops, device->fusions());  // throws where one does not parse
  CHECK(patterns.size() == device->fusions().size());
}

TEST_CASE("a GPU that cannot be opened is a resources error") {
  CudaDevice device({});
  testkit::check_refused(ErrorCode::resources, {"device cuda"}, [&] { device.open(1000); });
}

TEST_CASE("memory, copies, fills, events and capture") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  Device& gpu = *pair.gpu;
  Stream stream = gpu.stream(StreamKind::compute), side = gpu.stream(StreamKind::copy_in);
  CHECK(stream.handle != side.handle);
  constexpr std::size_t kBytes = 4099;
  auto* host = static_cast<std::uint8_t*>(gpu.allocate(MemoryKind::pinned, kBytes));
  void* memory = gpu.allocate(MemoryKind::device, kBytes);
  CHECK(reinterpret_cast<std::uintptr_t>(memory) % gpu.traits().alignment == 0);
  Event first = gpu.make_event(), second = gpu.make_event();
  gpu.record(first, stream);
  gpu.fill(memory, 7, kBytes, stream);
  gpu.record(second, stream);
  gpu.wait(side, second);
  gpu.copy(host, memory, kBytes, side);
  gpu.synchronize(side);
  CHECK((host[0] == 7 && host[kBytes - 1] == 7));
  CHECK(gpu.elapsed(first, second) >= 0);
  std::unique_ptr<Graph> graph = gpu.capture(stream, [&] {
    gpu.fill(memory, 9, kBytes, stream);
    gpu.copy(host, memory, kBytes, stream);
  });
  gpu.synchronize(stream);
  CHECK(host[0] == 7);  // captured, not run
  graph->launch(stream);
  gpu.synchronize(stream);
  CHECK((host[0] == 9 && host[kBytes - 1] == 9));
  CHECK_THROWS_AS(gpu.capture(stream, [] { throw Error(ErrorCode::internal, {.what = "inside"}); }), Error);
  gpu.fill(memory, 1, kBytes, stream);  // the stream works on after a capture that failed
  gpu.synchronize(stream);
  CHECK_THROWS_AS(gpu.allocate(MemoryKind::device, std::size_t{1} << 50), Error);
  gpu.release(MemoryKind::device, memory);
  gpu.release(MemoryKind::pinned, host);
}

TEST_CASE("words hold streams and let them go on, also in a graph that is launched again") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  Device& gpu = *pair.gpu;
  const Stream stream = gpu.stream(StreamKind::communication), side = gpu.stream(StreamKind::copy_out);
  const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  void* page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(page != MAP_FAILED);
  gpu.pin(page, bytes);
  auto* words = static_cast<std::uint32_t*>(page);
  std::uint32_t &go = words[0], &passed = words[16], &done = words[32];
  auto shared = [](std::uint32_t& word) { return std::atomic_ref(word); };
  auto* host = static_cast<std::uint8_t*>(gpu.allocate(MemoryKind::pinned, 1));
  void* memory = gpu.allocate(MemoryKind::device, 1);
  const Event begun = gpu.make_event(), ended = gpu.make_event();
  auto work = [&] {
    gpu.record(begun, stream);
    gpu.wait(side, begun);
    gpu.wait_word(&go, 5, stream);
    gpu.write_word(&passed, 1, stream);
    gpu.wait_word(&passed, 1, side);  // of the other stream
    gpu.fill(memory, 7, 1, side);
    gpu.copy(host, memory, 1, side);
    gpu.record(ended, side);
    gpu.wait(stream, ended);
    gpu.write_word(&done, 0x80000002, stream);
  };
  auto need_held_until_told = [&](const std::function<void()>& enqueue) {
    host[0] = 0;
    for (std::uint32_t* word : {&passed, &done}) shared(*word) = 0;
    shared(go) = 2;  // no bit of the mask
    enqueue();
    ::usleep(20'000);
    CHECK((shared(passed) == 0 && shared(done) == 0));
    shared(go) = 0xFFFFFFFE;
    gpu.synchronize(stream);
    CHECK((host[0] == 7 && shared(passed) == 1 && shared(done) == 0x80000002));
  };
  need_held_until_told(work);
  const std::unique_ptr<Graph> graph = gpu.capture(stream, work);
  for (int launch = 0; launch < 3; ++launch) need_held_until_told([&] { graph->launch(stream); });
  gpu.release(MemoryKind::device, memory);
  gpu.release(MemoryKind::pinned, host);
  gpu.unpin(page);
  ::munmap(page, bytes);
}

TEST_CASE("a large block is shared by a descriptor, from any place in it, and outlives its owner") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  Device& gpu = *pair.gpu;
  const Stream stream = gpu.stream(StreamKind::communication);
  constexpr std::size_t kBytes = (5 << 20) + 3, kOffset = 12345;
  auto* block = static_cast<char*>(gpu.allocate(MemoryKind::device, kBytes));
  gpu.fill(block, 1, kOffset, stream);
  gpu.fill(block + kOffset, 2, kBytes - kOffset, stream);
  const SharedHandle handle = gpu.export_memory(block + kOffset);
  if (handle.descriptor < 0) {
    MESSAGE("skipped: this driver exports no descriptors");
    return gpu.release(MemoryKind::device, block);
  }
  auto* mapped = static_cast<char*>(gpu.import_memory(handle));
  CHECK(mapped != block + kOffset);
  ::close(handle.descriptor);
  auto bytes = [&](const char* from) {
    std::vector<char> got(kBytes - kOffset);
    gpu.copy(got.data(), from, got.size(), stream);
    gpu.synchronize(stream);
    return got;
  };
  CHECK(bytes(mapped) == std::vector<char>(kBytes - kOffset, 2));
  gpu.fill(mapped, 3, kBytes - kOffset, stream);
  CHECK(bytes(block + kOffset) == std::vector<char>(kBytes - kOffset, 3));
  gpu.release(MemoryKind::device, block);
  CHECK(bytes(mapped) == std::vector<char>(kBytes - kOffset, 3));
  gpu.release_imported(mapped);
}

TEST_CASE("save_state holds the choices that matmuls were prepared with") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  pair.gpu->prepare(matmul(DType::bf16, DType::bf16));
  std::string state = pair.gpu->save_state();
  CHECK(state.find("64x48x32 NT bf16 bf16 bf16") != std::string::npos);
  pair.gpu->load_state(state);
  CHECK(pair.gpu->save_state() == state);
}
