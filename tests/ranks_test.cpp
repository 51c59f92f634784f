// What a run asks of a communicator, and when; tests/sdk_test.sh trains through one.
#include "run/ranks.h"

#include <doctest/doctest.h>

#include "quern/error.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;

namespace {

/// One rank of `size`, whose peers have the same gradients as this one.
class Mirror final : public Communicator {
 public:
  Mirror(int size, Device& device) : size_(size), device_(device) {}
  const CommunicatorTraits& traits() const override { return traits_; }
  int rank() const override { return 0; }
  int size() const override { return size_; }
  void connect(const Rendezvous&, Device&) override { calls += "connect "; }
  void unregister_buffer(void*) override {}
  void register_buffer(void*, std::size_t bytes) override { calls += "register " + std::to_string(bytes) + " "; }
  void all_reduce(const View& view, Reduction reduction, Stream stream) override {
    CHECK(reduction == Reduction::sum);
    device_.synchronize(stream);
    auto scale = [&](auto* values) {
      for (std::int64_t i = 0; i < view.count(); ++i) values[i] *= static_cast<float>(size_);
    };
    if (view.dtype == DType::f64)
      scale(view.as<double>());
    else
      scale(view.as<float>());
  }
  void reduce_scatter(const View&, const View&, Counts, Reduction, Stream) override {}
  void all_gather(const View&, const View&, Counts, Stream) override {}
  void all_to_all(const View&, const View&, Counts, Stream) override {}
  void broadcast(const View&, int, Stream) override {}
  void send(const View&, int, Stream) override {}
  void receive(const View&, int, Stream) override {}
  void barrier() override { calls += "barrier "; }
  std::optional<std::string> error() override { return fault; }
  void abort() noexcept override { calls += "abort "; }

  std::string calls;
  std::optional<std::string> fault;

 private:
  int size_;
  Device& device_;
  CommunicatorTraits traits_{.id = "mirror"};
};

ErrorCode code_of(const std::function<void()>& work, const std::string& message) {
  try {
    work();
  } catch (const Error& error) {
    CHECK(std::string(error.what()) == message);
    return error.code();
  }
  FAIL("nothing was thrown");
  return ErrorCode::internal;
}

}  // namespace

TEST_CASE("ranks sum gradients and loss, and a step then has the mean over all of them") {
  const Geometry geometry{2, 8};
  PlanOptions options;
  options.geometry = geometry;
  auto device = cpu_device();
  TinyRun run({}, options, DType::f32, *device);
  const Batch batch = random_batch(geometry, 37, 1);
  auto alone = run.gradients(batch);
  run.engine().update();
  const Engine::StepResult one = run.engine().result();

  TinyRun other({}, options, DType::f32, *device);
  Mirror mirror(4, *device);
  Ranks ranks(&mirror, {.rank = 0, .size = 4, .address = {}}, *device, other.engine());
  CHECK(mirror.calls == "connect register " + std::to_string(other.plan().device_bytes) + " barrier ");
  other.engine().micro_step(batch, {});
  ranks.reduce();
  ranks.check("step 1");
  auto summed = other.all("gradient");
  REQUIRE(summed.size() == alone.size());
  for (auto& [name, values] : summed)
    for (std::size_t i = 0; i < values.size(); ++i) REQUIRE(values[i] == 4 * alone[name][i]);
  other.engine().update();
  const Engine::StepResult four = other.engine().result();
  CHECK(four.loss.loss_sum == 4 * one.loss.loss_sum);
  CHECK(four.loss.valid_tokens == 4 * one.loss.valid_tokens);
  CHECK(four.update.gradient_norm == one.update.gradient_norm);  // powers of two round alike
}

TEST_CASE("a group of another size, and a collective that failed, are communication errors") {
  PlanOptions options;
  options.geometry = {1, 4};
  auto device = cpu_device();
  TinyRun run({}, options, DType::f32, *device);
  Mirror mirror(2, *device);
  auto connect = [&](int size) {
    Ranks ranks(&mirror, {.rank = 0, .size = size, .address = {}}, *device, run.engine());
  };
  CHECK(code_of(
            [&] { connect(1); },
            "communicator mirror: connected as another rank than it was asked to be: found rank 0 of 2, expected rank "
            "0 of 1; this is a fault in the plugin; please report it to its author") == ErrorCode::communication);
  mirror.calls.clear();
  mirror.fault = "rank 1 is gone";
  auto fail = [&] {
    Ranks ranks(&mirror, {.rank = 0, .size = 2, .address = {}}, *device, run.engine());
    ranks.check("step 12");
  };
  CHECK(code_of(fail,
                "step 12: communicator mirror: rank 1 is gone; run the same command again to go on from the last "
                "checkpoint") == ErrorCode::communication);
  CHECK(mirror.calls.ends_with("barrier abort "));
  mirror.calls.clear();
  connect(2);
  CHECK(mirror.calls.ends_with("barrier "));
}

TEST_CASE("without a communicator there is nothing to do") {
  PlanOptions options;
  options.geometry = {1, 4};
  auto device = cpu_device();
  TinyRun run({}, options, DType::f32, *device);
  Ranks ranks(nullptr, {}, *device, run.engine());
  ranks.reduce();
  ranks.check("step 1");
}
