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

TEST_CASE("the driver's product names find their row of the table") {
  auto id = [](const char* product) { return std::string(gpu_named(product) ? gpu_named(product)->id : "none"); };
  CHECK(id("NVIDIA H100 80GB HBM3") == "H100");
  CHECK(id("NVIDIA H100 PCIe") == "H100-PCIe");
  CHECK(id("NVIDIA H200") == "H200");
  CHECK(id("NVIDIA GH200 480GB") == "GH200");
  CHECK(id("NVIDIA A100-SXM4-80GB") == "A100");
  CHECK(id("NVIDIA A100-SXM4-40GB") == "A100-40GB");
  CHECK(id("NVIDIA A100 80GB PCIe") == "A100");
  CHECK(id("NVIDIA A10") == "A10");
  CHECK(id("NVIDIA RTX A6000") == "RTX-A6000");
  CHECK(id("NVIDIA GeForce RTX 4070 Ti SUPER") == "RTX-4070-Ti-Super");
  CHECK(id("NVIDIA L4") == "L4");
  CHECK(id("NVIDIA L40S") == "L40S");
  CHECK(id("NVIDIA GeForce RTX 4090") == "RTX-4090");
  CHECK(id("NVIDIA GeForce GTX 1080") == "none");
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
            (has_hopper_kernels() ? "own products of floats sum in fewer bits than fp32, but where they turn a"
                                  : "own products need compute capability 9.0 (Hopper) and its code in this build"));
  CHECK(h100.query(matmul(DType::e5m2, DType::bf16)).refusal ==
        "matmul: e5m2 times e5m2: at most one operand can be e5m2");
  OpInstance blocks = matmul(DType::e4m3, DType::bf16);
  blocks.attributes.set("scale_rows_b", std::int64_t{1});
  CHECK(assumed("L40S").query(blocks).refusal == "matmul: scales of blocks need compute capability 9.0 (Hopper)");
  CHECK(h100.query(matmul(DType::f32, DType::bf16)).refusal == "matmul: f32 times f32 gives f32 only on this device");
  OpInstance unknown;
  unknown.kind = "convolution";
  CHECK(h100.query(unknown).refusal == "the cuda device has no kernel for the op \"convolution\"");
}

TEST_CASE("int8 is quantized to and multiplied on every GPU, as docs/precision.md says") {
  const CudaDevice h100 = assumed("H100"), a100 = assumed("A100");
  for (const CudaDevice* device : {&h100, &a100}) {
    CHECK(device->query(matmul(DType::i8, DType::bf16)).refusal == "");
    const std::string refusal = device->query(matmul(DType::i8, DType::f32)).refusal;
    CHECK(refusal.starts_with("matmul: i8 times i8: own products "));
    CHECK(refusal.ends_with(", and the library's give bf16"));
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

TEST_CASE("save_state holds the choices that products were prepared with") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  pair.gpu->prepare(matmul(DType::bf16, DType::bf16));
  std::string state = pair.gpu->save_state();
  CHECK(state.find("64x48x32 NT bf16 bf16 bf16") != std::string::npos);
  pair.gpu->load_state(state);
  CHECK(pair.gpu->save_state() == state);
}
