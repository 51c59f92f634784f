// Of communicators: every collective against what it must give, computed on the host, for one rank. More ranks are more
// processes, which this program does not start.
#include <cstring>

#include "conformance/contracts.h"
#include "conformance/scratch.h"
#include "quern/testkit/device_memory.h"
#include "quern/testkit/op_comparison.h"

namespace quern::conformance {

namespace {

using testkit::DeviceMemory;

using testkit::PoisonedTensor;

struct Joined {
  std::unique_ptr<Device> device;
  Scratch scratch;
  std::unique_ptr<Communicator> communicator;

  explicit Joined(const Subject& subject)
      : device(open_device(subject.host, subject.options)), communicator(subject.make<Communicator>()) {
    communicator->connect({.rank = 0, .size = 1, .address = "file:" + (scratch.path() / "rendezvous").string()},
                          *device);
  }
};

std::string joins(const Subject& subject) {
  Joined joined(subject);
  Communicator& c = *joined.communicator;
  need(c.traits().id == subject.factory.id, "traits().id", c.traits().id, subject.factory.id);
  need(c.rank() == 0 && c.size() == 1, "rank and size", std::to_string(c.rank()) + " of " + std::to_string(c.size()),
       "0 of 1");
  c.barrier();
  if (auto fault = c.error()) broken("error() of a group without a fault", *fault, "nothing");
  return "one rank on device " + subject.options.device;
}

/// Runs a collective at odd sizes in the dtypes of gradients and of sums of losses; `apart`: its result is in another
/// buffer.
template <class Collective>
std::string collective(const Subject& subject, bool apart, const Collective& run) {
  Joined joined(subject);
  Device& device = *joined.device;
  Stream stream = device.stream(StreamKind::communication);
  int cases = 0;
  for (std::int64_t count : {1, 7, 128, 4097}) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
      const PoisonedTensor sent = testkit::normal(dtype, {count}, 3);
      DeviceMemory in(device, sent.view().bytes()), out(device, sent.view().bytes());
      in.write(sent.view().data);
      for (DeviceMemory* memory : {&in, &out}) joined.communicator->register_buffer(memory->data(), memory->bytes());
      run(*joined.communicator, View{in.data(), dtype, {count}}, View{out.data(), dtype, {count}}, stream);
      device.synchronize(stream);
      PoisonedTensor got(dtype, {count});
      (apart ? out : in).read(got.view().data);
      // One rank's sum, maximum, slab and part are its own values.
      std::string differs = testkit::mismatch(got.floats(), sent.floats(), 0);
      const std::string where = std::to_string(count) + " elements of " + std::string(name_of(dtype));
      need(differs.empty(), where, differs, "what was sent, to the bit");
      if (std::string touched = in.touched() + out.touched(); !touched.empty())
        broken(where, "bytes written " + touched + " a buffer", "none");
      ++cases;
    }
  }
  if (auto fault = joined.communicator->error()) broken("error() afterwards", *fault, "nothing");
  return std::to_string(cases) + " cases";
}

std::string ends(const Subject& subject) {
  Joined joined(subject);
  joined.communicator->abort();
  return "";
}

}  // namespace

void check_communicator(Report& report, const Subject& subject) {
  if (!report.contract("connects", [&] { return joins(subject); })) return;
  using C = Communicator;
  auto add = [&](const char* name, bool apart, auto run) {
    report.contract(name, [&] { return collective(subject, apart, run); });
  };
  add("all_reduce sum", false,
      [](C& c, const View& in, const View&, Stream s) { c.all_reduce(in, Reduction::sum, s); });
  add("all_reduce maximum", false,
      [](C& c, const View& in, const View&, Stream s) { c.all_reduce(in, Reduction::maximum, s); });
  add("reduce_scatter", true,
      [](C& c, const View& in, const View& out, Stream s) { c.reduce_scatter(in, out, {}, Reduction::sum, s); });
  add("all_gather", true, [](C& c, const View& in, const View& out, Stream s) { c.all_gather(in, out, {}, s); });
  add("all_to_all", true, [](C& c, const View& in, const View& out, Stream s) { c.all_to_all(in, out, {}, s); });
  add("broadcast", false, [](C& c, const View& in, const View&, Stream s) { c.broadcast(in, 0, s); });
  report.contract("abort", [&] { return ends(subject); });
}

}  // namespace quern::conformance
