#include "shared/pinned_store/pinned_pages.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "quern/error.h"
#include "shared/pinned_store/available_memory.h"

namespace quern {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kLeastForAThread = std::size_t{64} << 20;
constexpr std::size_t kMostThreads = 16;

[[noreturn]] void refuse(const std::string& id, const std::string& what, std::size_t bytes, const std::string& found) {
  throw Error(ErrorCode::resources,
              {.where = "offload " + id,
               .what = what,
               .found = found,
               .expected = std::to_string((bytes >> 20) + 1) + " MiB for the run's state",
               .next = "set memory.host_budget to the free memory, or keep less of [memory] in the store"});
}

/// One process at a time asks how much memory there is and takes it: the ranks of a machine start together, and each
/// would count what the others are about to take. The program's file is what they have in common; where it cannot be
/// locked they do not wait.
class Turn {
 public:
  Turn() : file_(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC)) {
    while (file_ >= 0 && ::flock(file_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~Turn() {
    if (file_ >= 0) ::close(file_);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  int file_;
};

/// Where pages go is a wish: a system without nodes, or a container that forbids it, puts them elsewhere.
void prefer_node(std::byte* data, std::size_t bytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  const unsigned long nodes = 1ul << node;
  ::syscall(SYS_mbind, data, bytes, kPreferred, &nodes, sizeof nodes * 8 + 1, 0);
}

/// The system gives a page, zeroed, when it is first written.
void take_pages(std::byte* data, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t processors = std::max(std::thread::hardware_concurrency(), 1u);
  const std::size_t count = std::clamp(bytes / kLeastForAThread, std::size_t{1}, std::min(processors, kMostThreads));
  const std::size_t part = (bytes / count + kHugePage - 1) / kHugePage * kHugePage;
  std::vector<std::jthread> threads;
  for (std::size_t begin = 0; begin < bytes; begin += part)
    threads.emplace_back([=] {
      for (std::size_t at = begin; at < std::min(begin + part, bytes); at += page)
        *const_cast<volatile std::byte*>(data + at) = std::byte{0};
    });
}

}  // namespace

PinnedPages::PinnedPages(Device& device, const std::string& id, MemoryKind memory, std::size_t bytes)
    : device_(device), memory_(memory) {
  const std::size_t page = bytes < kHugePage ? static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) : kHugePage;
  const Turn turn;
  const auto available = available_memory();
  if (available && bytes > *available)
    refuse(id, "not enough host memory", bytes, std::to_string(*available >> 20) + " MiB available");
  bytes_ = (std::max(bytes, std::size_t{1}) + page - 1) / page * page;
  if (memory_ == MemoryKind::write_combined)
    allocate_combined();
  else
    map_pages(id);
}

void PinnedPages::map_pages(const std::string& id) {
  void* mapped = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) refuse(id, "host memory cannot be had", bytes_, std::strerror(errno));
  data_ = static_cast<std::byte*>(mapped);
  ::madvise(data_, bytes_, MADV_HUGEPAGE);
  if (const int node = device_.traits().numa_node; node >= 0 && node < 64) prefer_node(data_, bytes_, node);
  try {
    take_pages(data_, bytes_);
    device_.pin(data_, bytes_);
  } catch (...) {
    ::munmap(data_, bytes_);
    throw;
  }
}

void PinnedPages::allocate_combined() {
  data_ = static_cast<std::byte*>(device_.allocate(memory_, bytes_));
  const Stream stream = device_.stream(StreamKind::copy_out);
  device_.fill(data_, 0, bytes_, stream);
  device_.synchronize(stream);
}

PinnedPages::~PinnedPages() {
  if (memory_ == MemoryKind::write_combined) {
    device_.release(memory_, data_);
    return;
  }
  device_.unpin(data_);
  ::munmap(data_, bytes_);
}

}  // namespace quern
