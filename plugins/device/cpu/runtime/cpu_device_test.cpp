#include "runtime/cpu_device.h"

#include <cmath>
#include <cstring>
#include <set>
#include <string>

#include <doctest/doctest.h>

#include "products/blas.h"
#include "quern/error.h"
#include "quern/testkit/plugin_under_test.h"
#include "quern/testkit/refusal.h"
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu;
using namespace quern::cpu::harness;
using testkit::PoisonedTensor;

TEST_CASE("traits follow the options") {
  CpuDevice device({.threads = 3, .memory = 64});
  CHECK(device.traits().id == "cpu");
  CHECK(device.traits().name.rfind("3 cores, ", 0) == 0);
  CHECK(device.traits().memory_bytes == std::size_t{64} << 20);
  CHECK(device.traits().host_addressable);
  CHECK_FALSE(device.traits().can_capture);
  CHECK(CpuDevice({}).traits().memory_bytes > std::size_t{64} << 20);
}

TEST_CASE("memory is aligned, and what cannot be had is a resources error with the size") {
  CpuDevice device({});
  device.open(0);
  for (std::size_t bytes : {0, 1, 255, 4097}) {
    void* memory = device.allocate(MemoryKind::device, bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(memory) % device.traits().alignment == 0);
    std::memset(memory, 1, bytes);
    device.release(MemoryKind::device, memory);
  }
  for (std::size_t bytes : {SIZE_MAX, SIZE_MAX / 4}) {
    const Error error = testkit::error_of([&] { device.allocate(MemoryKind::pinned, bytes); });
    CHECK(error.code() == ErrorCode::resources);
    testkit::check_holds(error.detail().found, {std::to_string(bytes)});
  }
  CHECK_THROWS_AS(device.open(1), Error);
}

TEST_CASE("copies and fills run in the order of their stream, events measure time") {
  for (const char* mode : {"threads", "shuffled"}) {
    CAPTURE(mode);
    CpuDevice device({.streams = mode});
    Stream stream = device.stream(StreamKind::compute);
    CHECK(stream.handle != nullptr);
    CHECK(stream.handle != device.stream(StreamKind::copy_in).handle);
    char from[3] = {1, 2, 3}, to[3] = {};
    device.copy(to, from, 3, stream);
    device.fill(to, 9, 2, stream);
    Event first = device.make_event(), second = device.make_event();
    device.record(first, stream);
    device.wait(stream, first);
    device.record(second, stream);
    device.synchronize(second);
    CHECK((to[0] == 9 && to[1] == 9 && to[2] == 3));
    CHECK(device.elapsed(first, second) >= 0);
    CHECK(device.elapsed(second, first) <= 0);
    CHECK_THROWS_AS(device.capture(stream, [] {}), Error);
  }
}

TEST_CASE("memory is given back once nothing uses it") {
  for (const char* mode : {"threads", "shuffled"}) {
    CAPTURE(mode);
    CpuDevice device({.streams = mode});
    char last = 0;
    void* memory = device.allocate(MemoryKind::device, std::size_t{1} << 24);
    for (int i = 0; i < 8; ++i) device.fill(memory, 3, std::size_t{1} << 24, device.stream(StreamKind::copy_out));
    device.copy(&last, memory, 1, device.stream(StreamKind::copy_out));
    device.release(MemoryKind::device, memory);
    CHECK(last == 3);
  }
}

TEST_CASE("a kernel runs on the stream it is launched on, with views and a kernel that are gone by then") {
  for (StreamKind kind : {StreamKind::compute, StreamKind::communication}) {
    CpuDevice device({.threads = 2, .streams = "shuffled"});
    const auto a = normal(DType::f32, {300, 70}, 1), b = normal(DType::f32, {300, 70}, 2);
    PoisonedTensor y(DType::f32, {300, 70}), want(DType::f32, {300, 70});
    const TestOp op{"add", {a.view(), b.view()}, {y.view()}};
    const Stream stream = device.stream(kind);
    {
      const std::vector<View> inputs = op.inputs, outputs = op.outputs;
      device.prepare(op.instance())->launch(inputs, outputs, {stream, nullptr});
    }
    CHECK(std::isnan(y.floats()[0]));
    device.synchronize(stream);
    TestOp{"add", op.inputs, {want.view()}}.run();
    CHECK(testkit::mismatch(y.floats(), want.floats(), 0) == "");
  }
}

TEST_CASE("what a kernel throws is thrown by the host's next wait, and a foreign stream is refused at once") {
  CpuDevice device({});
  const auto table = normal(DType::f32, {4, 8}, 1);
  const auto tokens = integer_tensor({0, 4});
  PoisonedTensor y(DType::f32, {2, 8});
  const TestOp op{"embedding", {tokens.view(), table.view()}, {y.view()}};
  auto kernel = device.prepare(op.instance());
  CHECK_THROWS_WITH_AS(kernel->launch(op.inputs, op.outputs, {}), doctest::Contains("stream"), Error);
  kernel->launch(op.inputs, op.outputs, {device.stream(StreamKind::compute), nullptr});
  CHECK_THROWS_WITH_AS(device.synchronize(device.stream(StreamKind::compute)),
                       doctest::Contains("not in the vocabulary"), Error);
}

TEST_CASE("an unknown kind is named, a kernel added for it, or over a built-in one, is used") {
  CpuDevice device({});
  OpInstance op;
  op.kind = "frobnicate";
  CHECK(device.query(op).refusal == "the cpu device has no kernel for the op \"frobnicate\"");
  CHECK_THROWS_WITH_AS(device.prepare(op), doctest::Contains("frobnicate"), Error);
  struct Count : Kernel {
    int& launches;
    explicit Count(int& launches) : launches(launches) {}
    void launch(std::span<const View>, std::span<const View>, const Exec&) const override { ++launches; }
  };
  int launches = 0;
  for (const char* kind : {"frobnicate", "matmul"}) {
    auto make = [&launches](const OpInstance&) { return std::make_unique<Count>(launches); };
    op.kind = kind;
    device.add_kernel({"cpu", kind, make});
    CHECK(device.query(op).refusal.empty());
    CHECK_FALSE(device.query(op).concurrent);  // it may keep scratch of its own
    launches = 0;
    device.prepare(op)->launch({}, {}, {device.stream(StreamKind::compute), nullptr});
    device.synchronize(device.stream(StreamKind::compute));
    CHECK(launches == 1);
    device.add_kernel({"cpu", kind, make, [](const OpInstance&) { return OpSupport{"", 4096}; }});
    CHECK(device.query(op).workspace_bytes == 4096);
    CHECK(device.query(op).concurrent);
  }
}

TEST_CASE("every fusion is offered once") {
  CpuDevice device({});
  std::set<std::string> kinds;
  for (const Fusion& fusion : device.fusions()) {
    kinds.insert(fusion.kind);
    CHECK_FALSE(fusion.pattern.empty());
  }
  CHECK(kinds.size() == device.fusions().size());
}

TEST_CASE("no number of threads changes a bit of a GEMM") {
  struct Sizes {
    std::int64_t m, n, k;
  };
  // Over the depths at which the BLAS cuts a sum in another way when it has several threads.
  for (const Sizes& size : {Sizes{257, 129, 500}, Sizes{640, 384, 577}, Sizes{64, 48, 5000}, Sizes{2048, 256, 896}}) {
    CAPTURE(to_string(Extents{size.m, size.n, size.k}));
    const auto a = normal(DType::f32, {size.m, size.k}, 1), b = normal(DType::f32, {size.n, size.k}, 2);
    std::vector<float> one;
    for (std::int64_t threads : {1, 2, 3, 5}) {
      CAPTURE(threads);
      PoisonedTensor y(DType::f32, {size.m, size.n});
      TestOp{"matmul", {a.view(), b.view()}, {y.view()}, {{"transpose_b", std::int64_t{1}}}}.run(threads);
      if (one.empty()) one = y.floats();
      CHECK(testkit::mismatch(y.floats(), one, 0) == "");
    }
  }
}

TEST_CASE("the state names what bits depend on beside the config") {
  CpuDevice device({}), other({.threads = 3});
  CHECK(device.save_state().starts_with("{\"blas\": \""));
  CHECK(device.save_state().find("\"vectors\": \"") != std::string::npos);
  CHECK(other.save_state() == device.save_state());
  CHECK(device.save_state().find("threads") == std::string::npos);
  // The kernel is part of it, and of the name that the run's log has.
  const std::string blas = blas_name();
  CHECK(device.save_state().find("\"blas\": \"" + blas + "\"") != std::string::npos);
  CHECK(device.traits().name.find(blas) == std::string::npos);
  device.open(0);
  CHECK(device.traits().name.ends_with(", " + blas));
}

TEST_CASE("the manifest makes a device from options") {
  OptionValues values;
  values.set("threads", std::int64_t{2});
  CHECK(testkit::plugin_under_test<Device>("cpu", values)->traits().name.rfind("2 cores", 0) == 0);
}
