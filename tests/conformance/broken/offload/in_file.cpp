// A store in a file. Sound, or a fault: it passes over writes or reads that fail, over reads into memory that still has
// the last put's bytes ("stale"), takes those that end early as done, or leaves its file behind.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "quern/error.h"
#include "quern/plugin.h"

namespace {

using namespace quern;

class InFile final : public OffloadStore {
 public:
  explicit InFile(std::string fault) : wrong_(std::move(fault)) { traits_.id = "in_file"; }
  ~InFile() override {
    if (file_ < 0) return;
    flush();
    ::close(file_);
    if (wrong_ != "file") ::unlink(path_.c_str());
  }
  const OffloadTraits& traits() const override { return traits_; }
  void open(Device& device, const StorePlace& place) override {
    static std::atomic<int> number = 0;
    device_ = &device;
    path_ = place.folder + "/slots_" + std::to_string(place.rank) + "_" + std::to_string(++number);
    file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file_ < 0) throw Error(ErrorCode::resources, {.where = "store", .what = "no file " + path_});
  }
  OffloadSlot reserve(std::size_t bytes) override {
    if (bytes > std::size_t{1} << 40 || ::ftruncate(file_, static_cast<off_t>(end_ + bytes)) != 0)
      throw Error(ErrorCode::resources, {.where = "store", .what = "no room"});
    end_ += bytes;
    return static_cast<OffloadSlot>(end_ - bytes);
  }
  void put(OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes, Stream stream) override {
    auto buffer = std::make_shared<std::vector<char>>(bytes);
    device_->copy(buffer->data(), memory, bytes, stream);
    auto write = [this, buffer, at = static_cast<off_t>(slot) + static_cast<off_t>(offset)] {
      move("writes", *buffer, [&](char* data, std::size_t left, std::size_t done) {
        return ::pwrite(file_, data, left, at + static_cast<off_t>(done));
      });
      const std::lock_guard guard(lock_);
      if (wrong_ == "stale") last_ = *buffer;
    };
    device_->call(write, stream);
    note(stream);
  }
  void get(OffloadSlot slot, std::size_t offset, void* memory, std::size_t bytes, Stream stream) override {
    auto buffer = std::make_shared<std::vector<char>>(bytes);
    auto read = [this, buffer, at = static_cast<off_t>(slot) + static_cast<off_t>(offset)] {
      if (const std::lock_guard guard(lock_); last_.size() == buffer->size()) *buffer = last_;
      move("reads", *buffer, [&](char* data, std::size_t left, std::size_t done) {
        return ::pread(file_, data, left, at + static_cast<off_t>(done));
      });
    };
    device_->call(read, stream);
    device_->copy(memory, buffer->data(), bytes, stream);
    device_->call([buffer] {}, stream);
    note(stream);
  }
  void prefetch(OffloadSlot, std::size_t, std::size_t) override {}
  void* map(OffloadSlot) override { fail_internal("store", "cannot be mapped"); }
  void flush() override {
    for (Stream stream : streams_) device_->synchronize(stream);
    streams_.clear();
  }
  std::optional<std::string> error() override {
    const std::lock_guard guard(lock_);
    return fault_;
  }

 private:
  template <class Move>
  void move(const std::string& what, std::vector<char>& buffer, Move some) {
    for (std::size_t done = 0; done < buffer.size();) {
      const ssize_t moved = some(buffer.data() + done, buffer.size() - done, done);
      if (moved <= 0) {
        const std::lock_guard guard(lock_);
        const bool stale = wrong_ == "stale" && what == "reads";
        if (wrong_ != what && !stale && !(wrong_ == "ends" && moved == 0)) fault_ = what + " fail";
        return;
      }
      if (wrong_ == "ends") return;
      done += static_cast<std::size_t>(moved);
    }
  }
  void note(Stream stream) {
    for (Stream known : streams_)
      if (known.handle == stream.handle) return;
    streams_.push_back(stream);
  }

  std::string wrong_, path_;
  OffloadTraits traits_;
  Device* device_ = nullptr;
  int file_ = -1;
  std::size_t end_ = 0;
  std::vector<Stream> streams_;
  std::mutex lock_;
  std::optional<std::string> fault_;
  std::vector<char> last_;
};

}  // namespace

QUERN_PLUGIN("offload", "in_file", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  OptionSpec fault;
  fault.key = "fault", fault.help = "what is wrong", fault.type = OptionType::text;
  fault.choices = {"none", "writes", "reads", "stale", "ends", "file"}, fault.default_value = std::string("none");
  manifest.add<OffloadStore>("in_file", "a file in the run's folder", {fault}, [](const OptionValues& values) {
    return std::make_unique<InFile>(values.get<std::string>("fault"));
  });
}
