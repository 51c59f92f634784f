// Of offload stores: memory, files and disks that fail, and what a store leaves behind.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <set>

#include "conformance/harness/counting_device.h"
#include "conformance/harness/growth.h"
#include "conformance/store/flipped_bit.h"
#include "conformance/store/opened_store.h"
#include "quern/error.h"
#include "quern/testkit/forwarding_device.h"

namespace quern::conformance {

namespace {

using testkit::DeviceMemory;
using Bytes = OpenedStore::Bytes;

std::string grows(const Subject& subject) {
  OpenedStore opened(subject);
  const OffloadSlot slot = opened.store->reserve(9001);
  DeviceMemory memory(*opened.device, 9001);
  memory.write(pattern(9001, 4).data());
  auto calls = [&] {
    opened.store->put(slot, 0, memory.data(), 9001, opened.stream);
    opened.store->prefetch(slot, 5, 4000);
    opened.store->get(slot, 5, memory.data(), 4000, opened.stream);
    opened.device->synchronize(opened.stream);
  };
  const std::string text = need_no_growth("put and get", calls);
  need_no_growth("put, get and flush", [&] { calls(), opened.store->flush(); });
  return text + ", and with flush";
}

/// Stores that are opened, used and destroyed leave nothing of the process, the device or the folder.
std::string openings(const Subject& subject) {
  const TestDirectory folder;
  CountingDevice device(open_device(subject.host, subject.options));
  const Stream stream = device.stream(StreamKind::copy_out);
  DeviceMemory memory(device, 9001);
  const int before = device.held();
  const std::string text =
      need_no_growth("a store opened, used and destroyed",
                     [&] {
                       auto store = subject.make<OffloadStore>();
                       store->open(device, {.folder = folder.path()});
                       const OffloadSlot slot = store->reserve(9001);
                       store->put(slot, 0, memory.data(), 9001, stream);
                       store->get(slot, 0, memory.data(), 9001, stream);
                       store->put(slot, 5, memory.data(), 4000, stream);  // under way when the store is destroyed
                       store.reset();
                       device.synchronize(stream);
                       need(device.held() == before, "allocations of the device by a store that is gone",
                            std::to_string(device.held() - before) + " not released", "none");
                     },
                     {.first = 20, .calls = 200});
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
    broken("the run's folder after " + text, entry.path().filename(), "no file");
  return text;
}

/// A device whose memory runs out once. A store's threads may allocate too.
class Exhausted final : public testkit::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  /// After `calls` more allocations one fails; negative: none.
  void fail_after(int calls) { left_ = calls; }
  bool failed() const { return failed_; }
  void* allocate(MemoryKind kind, std::size_t bytes) override {
    if (left_.fetch_sub(1) == 0) {
      failed_ = true;
      throw Error(ErrorCode::resources, {.where = "device", .what = "out of memory"});
    }
    return ForwardingDevice::allocate(kind, bytes);
  }

 private:
  std::atomic<int> left_ = -1;
  std::atomic<bool> failed_ = false;
};

/// The first, second, ... allocation after open() fails: a resources error, and the store works on, or has a fault,
/// after which it need do nothing.
std::string memory_runs_out(const Subject& subject) {
  int failures = 0;
  for (bool failed = true; failed; ++failures) {
    auto made = std::make_unique<Exhausted>(open_device(subject.host, subject.options));
    Exhausted& device = *made;
    OpenedStore opened(subject, std::move(made));
    const OffloadSlot slot = opened.store->reserve(90001);
    DeviceMemory memory(device, 90001);
    const std::string what = "allocation " + std::to_string(failures + 1) + " of the device fails";
    device.fail_after(failures);
    // Sizes that rise and fall: what a failed call leaves is used again.
    for (const std::size_t bytes : {50001, 90001, 90001, 777, 90001}) {
      const Bytes want = pattern(bytes, static_cast<unsigned>(bytes));
      for (const bool again : {false, true}) {
        if (opened.store->error()) break;  // it says so
        try {
          device.copy(memory.data(), want.data(), bytes, opened.stream);
          device.synchronize(opened.stream);
          opened.store->put(slot, 0, memory.data(), bytes, opened.stream);
          device.synchronize(opened.stream);
          device.fill(memory.data(), 0xee, bytes, opened.stream);
          device.synchronize(opened.stream);
          opened.store->get(slot, 0, memory.data(), bytes, opened.stream);
          device.synchronize(opened.stream);
        } catch (const Error& error) {
          need(error.code() == ErrorCode::resources && !again, "a call when " + what, error.what(),
               again ? "no error when it is repeated" : "a resources error");
          device.synchronize(opened.stream);
          continue;
        }
        if (opened.store->error()) break;
        Bytes got(bytes);
        device.copy(got.data(), memory.data(), bytes, opened.stream);
        device.synchronize(opened.stream);
        need_same("a get of " + std::to_string(bytes) + " bytes after " + what, got, want);
        break;
      }
    }
    failed = device.failed();
    device.fail_after(-1);
  }
  return std::to_string(failures - 1) + " allocations of its own";
}

/// Whether the store reports a fault: by an Error of the call, or by error().
bool reports(OpenedStore& opened, const std::function<void()>& calls) {
  try {
    calls();
  } catch (const Error& error) {
    need(error.code() != ErrorCode::internal, "a call that cannot be done", error.what(), "an error of the machine");
    return true;
  }
  return opened.store->error().has_value();
}

/// While it lives, files can have no byte from this one on, as on a full disk.
class FileLimit {
 public:
  explicit FileLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

constexpr std::size_t kFaultBytes = (std::size_t{2} << 20) + 5;

/// Writes fail at once, or end in the middle of a put.
std::string failed_writes(const Subject& subject) {
  int reported = 0;
  for (const rlim_t limit : {rlim_t{0}, rlim_t{1} << 20}) {
    OpenedStore opened(subject);
    const OffloadSlot slot = opened.store->reserve(kFaultBytes);
    opened.put(slot, 0, pattern(kFaultBytes, 1));
    opened.store->flush();
    const Bytes want = pattern(kFaultBytes, 2);
    const bool says = reports(opened, [&] {
      const FileLimit full(limit);
      opened.put(slot, 0, want);
      opened.store->flush();
    });
    reported += says;
    if (!says)
      need_same("a put while files may have " + std::to_string(limit) + " bytes, and error() says nothing",
                opened.get(slot, 0, kFaultBytes), want);
  }
  OpenedStore opened(subject);
  OffloadSlot slot = -1;
  try {
    const FileLimit full(0);
    slot = opened.store->reserve(kFaultBytes);
  } catch (const Error& error) {
    need(error.code() == ErrorCode::resources, "a slot for which there is no room", error.what(), "a resources error");
    slot = opened.store->reserve(kFaultBytes);
  }
  const Bytes want = pattern(kFaultBytes, 3);
  if (!reports(opened, [&] { opened.put(slot, 0, want), opened.store->flush(); }))
    need_same("a slot that was reserved when there was no room", opened.get(slot, 0, kFaultBytes), want);
  return reported == 0 ? "it writes no file" : "reported";
}

/// Descriptors of regular files with a name in a file system.
std::set<int> open_files() {
  std::set<int> files;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string path = std::filesystem::read_symlink(entry.path(), gone);
    struct stat status {};
    if (gone || path.starts_with("/memfd:") || path.starts_with("/proc/") || ::stat(entry.path().c_str(), &status) != 0)
      continue;
    if (S_ISREG(status.st_mode)) files.insert(std::stoi(entry.path().filename()));
  }
  return files;
}

constexpr std::size_t kReadBytes = 200'005;
constexpr int kOtherPuts = 100;  // more than a store has buffers

/// Reads of the store's files fail, or find an end. Memory for transfers must not still have the bytes that they would
/// give: others are put and got before.
std::string failed_reads(const Subject& subject) {
  int replaced = 0;
  for (const int rights : {O_WRONLY, O_RDWR}) {
    std::unique_ptr<Device> device = open_device(subject.host, subject.options);
    const std::set<int> before = open_files();
    OpenedStore opened(subject, std::move(device));
    const OffloadSlot slot = opened.store->reserve(kReadBytes);
    const Bytes want = pattern(kReadBytes, 1);
    opened.put(slot, 0, want);
    const OffloadSlot others = opened.store->reserve(kReadBytes);
    const Bytes other = pattern(kReadBytes, 2);
    for (int i = 0; i < kOtherPuts; ++i) {
      opened.put(others, 0, other);
      opened.get(others, 0, kReadBytes);
    }
    opened.store->flush();
    const int empty = ::open("/dev/null", rights | O_CLOEXEC);
    for (const int file : open_files())
      if (!before.contains(file)) ::dup3(empty, file, O_CLOEXEC), ++replaced;
    ::close(empty);
    Bytes got;
    if (!reports(opened, [&] { got = opened.get(slot, 0, kReadBytes); }))
      need_same(rights == O_RDWR ? "a get from a file that ends early, and error() says nothing"
                                 : "a get whose reads fail, and error() says nothing",
                got, want);
  }
  return replaced == 0 ? "it keeps no file open" : "reported, or the bytes are right";
}

std::string refuses(const Subject& subject) {
  OpenedStore opened(subject);
  constexpr std::size_t kTooLarge = std::size_t{1} << 60;
  std::string result = "takes any size";
  try {
    opened.store->reserve(kTooLarge);
  } catch (const Error& error) {
    need(error.code() == ErrorCode::resources, "a slot of 2^60 bytes",
         std::string("code ") + std::to_string(static_cast<int>(error.code())) + ", " + error.what(),
         "a resources error that names the limit");
    result = "refused";
  }
  const OffloadSlot slot = opened.store->reserve(777);
  const Bytes want = pattern(777, 3);
  opened.put(slot, 0, want);
  need_same("a slot that was reserved after that", opened.get(slot, 0, want.size()), want);
  opened.need_no_fault();
  return result;
}

}  // namespace

void check_store_faults(Report& report, const Subject& subject) {
  report.contract("calls leave nothing", [&] { return grows(subject); });
  report.contract("stores leave nothing", [&] { return openings(subject); });
  report.contract("memory that runs out", [&] { return memory_runs_out(subject); });
  report.contract("a slot that is too large", [&] { return refuses(subject); });
  report.contract("writes that fail", [&] { return failed_writes(subject); });
  report.contract("reads that fail", [&] { return failed_reads(subject); });
  report.contract("a bit that flips", [&] {
    // A store that has checksums reports it. One without may give other bytes; then the author states so.
    return std::string(name_of(after_flipped_bit(subject)));
  });
}

}  // namespace quern::conformance
