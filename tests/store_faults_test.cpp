// Stores that fail, hosts without the memory for them, and runs that are killed with their state in stores: one message
// that says so, and checkpoints from which the same command goes on to the same bits.
#include <atomic>
#include <csignal>
#include <filesystem>
#include <random>
#include <utility>

#include <doctest/doctest.h>
#include <unistd.h>

#include "base/clock.h"
#include "checkpoint/checkpoint_store.h"
#include "end_to_end.h"
#include "quern/error.h"
#include "run/session.h"

using namespace quern;
using namespace quern::testing;

namespace {

constexpr const char* kReason = "the link is down";

/// Another store, of which one put or get throws and later ones work, so that the rest can be saved; or all from
/// some call on lose their bytes, and error() says so.
class FailingStore final : public OffloadStore {
 public:
  enum class Failure : std::uint8_t { throws, reports };

  /// `calls` counts puts and gets, and outlives the store.
  FailingStore(std::unique_ptr<OffloadStore> store, Failure failure, int good_calls, int& calls)
      : store_(std::move(store)), failure_(failure), good_calls_(good_calls), calls_(calls) {}

  const OffloadTraits& traits() const override { return store_->traits(); }
  void open(Device& device, const StorePlace& place) override {
    device_ = &device;
    store_->open(device, place);
  }
  OffloadSlot reserve(std::size_t bytes) override { return store_->reserve(bytes); }
  void put(OffloadSlot slot, std::size_t offset, const void* from, std::size_t bytes, Stream stream) override {
    if (works()) store_->put(slot, offset, from, bytes, stream);
  }
  void get(OffloadSlot slot, std::size_t offset, void* to, std::size_t bytes, Stream stream) override {
    if (works()) return store_->get(slot, offset, to, bytes, stream);
    device_->fill(to, 0xff, bytes, stream);
  }
  void prefetch(OffloadSlot slot, std::size_t offset, std::size_t bytes) override {
    store_->prefetch(slot, offset, bytes);
  }
  void* map(OffloadSlot slot) override { return store_->map(slot); }
  void flush() override { store_->flush(); }
  std::optional<std::string> error() override {
    return failed_ ? std::optional<std::string>(kReason) : store_->error();
  }

 private:
  bool works() {
    const int call = calls_++;
    if (call < good_calls_ || (failure_ == Failure::throws && call > good_calls_)) return true;
    if (failure_ == Failure::throws) throw Error(ErrorCode::resources, {.where = "offload host", .what = kReason});
    failed_ = true;
    return false;
  }

  std::unique_ptr<OffloadStore> store_;
  Failure failure_;
  int good_calls_;
  int& calls_;
  Device* device_ = nullptr;
  std::atomic<bool> failed_ = false;
};

/// A run of 8 steps with all state in stores, evaluations and checkpoints.
Overrides words(const TinyFiles& files, const std::string& run) {
  return {"precision.id=bf16",  "train.steps=8",       "train.accumulation=2",  "train.eval_every=3",
          "memory.master=host", "memory.moments=host", "memory.gradients=host", "memory.weights=host",
          "checkpoint.every=2", files.run(run)};
}

/// What ended the run; empty when it came to its end.
std::string failure_of(const TinyFiles& files, const std::string& run, FailingStore::Failure failure, int good_calls,
                       int& calls) {
  try {
    calls = 0;
    train_here(files, words(files, run), 0, [&](Session& session) {
      REQUIRE(session.stores.size() == 1);
      session.stores[0] = std::make_unique<FailingStore>(std::move(session.stores[0]), failure, good_calls, calls);
    });
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::resources);  // exit code 4
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a store that fails ends the run with its reason, and what is saved leads to the same bits") {
  using Failure = FailingStore::Failure;
  TinyFiles files;
  int calls = 0;
  REQUIRE(failure_of(files, "straight", Failure::throws, 1 << 30, calls).empty());
  const int all = calls;
  const std::string want = newest_tensors(files.at("straight"));
  const Losses losses = logged_losses(files.at("straight"));
  constexpr int kMoments = 12;
  for (Failure failure : {Failure::throws, Failure::reports})
    for (int moment = 0; moment < kMoments; ++moment) {
      CAPTURE(moment);
      const std::string run = (failure == Failure::throws ? "thrown" : "reported") + std::to_string(moment);
      CAPTURE(run);
      const std::string message = failure_of(files, run, failure, moment * all / kMoments + 13 * moment, calls);
      CHECK(has(message, kReason));
      CHECK(occurrences(message, "offload host") == 1);
      CHECK(train_here(files, words(files, run)).result.finished);
      CHECK((newest_tensors(files.at(run)) == want));
      CHECK(logged_losses(files.at(run)) == losses);
      const NewestCheckpoint newest = find_newest(files.at(run));
      CHECK(newest.skipped.empty());
      CHECK(newest.strangers.empty());
    }
}

TEST_CASE("killed at random moments with its state in stores, a run goes on to the same bits") {
  TinyFiles files;
  double longest = -now();
  REQUIRE(quern_train(files, words(files, "straight")).code == 0);
  longest += now();
  std::mt19937 random(1);
  for (int killed = 0; killed < 8;) {
    CAPTURE(killed);
    const double moment = std::uniform_real_distribution<double>(0, longest)(random);
    Child child(train_arguments(files, words(files, "run")));
    ::usleep(static_cast<useconds_t>(moment * 1e6));
    child.signal(SIGKILL);
    const int code = child.wait();
    REQUIRE((code == -SIGKILL || code == 0));
    killed += code == -SIGKILL ? 1 : 0;
    if (code == 0) {  // too late: again from the beginning, and earlier
      longest = moment;
      std::filesystem::remove_all(files.at("run"));
    }
  }
  REQUIRE(quern_train(files, words(files, "run")).code == 0);
  CHECK((newest_tensors(files.at("run")) == newest_tensors(files.at("straight"))));
  CHECK(logged_losses(files.at("run")) == logged_losses(files.at("straight")));
}

TEST_CASE("a budget of host memory that the stores do not fit is refused before anything starts") {
  TinyFiles files;
  for (const char* store : {"host", "zerocopy"}) {
    Overrides overrides{"memory.host_budget=\"16KiB\"", files.run("run")};
    for (const char* kind : {"master", "moments"}) overrides.push_back("memory." + std::string(kind) + "=" + store);
    check_fails(quern_train(files, overrides), 4, {"memory.host_budget: the run does not fit", "16.0 KiB"});
    CHECK(newest_step(files.at("run")) == -1);
  }
}

TEST_CASE("a host without the memory for a store is refused before any of it is taken") {
  TinyFiles files;  // 13 TiB of state beside 0.3 GiB on the device, which is not touched
  Overrides overrides{"model.llama.hidden_size=32768",
                      "model.llama.intermediate_size=131072",
                      "model.llama.num_hidden_layers=60",
                      "model.llama.num_attention_heads=256",
                      "train.micro_batch=1",
                      "train.sequence=2",
                      "checkpoint.every=0",
                      files.run("run")};
  for (const char* kind : {"master", "moments", "gradients", "weights"})
    overrides.push_back("memory." + std::string(kind) + "=zerocopy");
  check_fails(quern_train(files, overrides), 4,
              {"offload zerocopy: not enough host memory", "MiB available", "for the run's state"});
  CHECK(newest_step(files.at("run")) == -1);
}
