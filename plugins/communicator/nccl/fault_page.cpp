#include "fault_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "quern/error.h"

namespace quern::nccl {

namespace {

enum State : std::uint32_t { kSilent, kWriting, kTold };

}  // namespace

struct FaultPage::Seat {
  std::atomic<std::uint32_t> state;  // zero: kSilent
  char text[508];                    // written before `state` becomes kTold; ends with a zero byte
};

FaultPage::FaultPage(const std::string& path, int rank, int size) : rank_(rank), size_(size) {
  const std::size_t bytes = sizeof(Seat) * static_cast<std::size_t>(size);
  void* mapped = MAP_FAILED;
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  int reason = errno;
  // By each rank: only the first changes anything. A page without its block would end the process when written to.
  if (file >= 0) reason = ::posix_fallocate(file, 0, static_cast<off_t>(bytes));
  if (file >= 0 && reason == 0) {
    mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    reason = errno;
  }
  if (file >= 0) ::close(file);
  if (mapped == MAP_FAILED)
    throw Error(ErrorCode::resources, {.where = "communicator nccl: " + path,
                                       .what = "ranks cannot share a file",
                                       .found = std::strerror(reason),
                                       .next = "free space there, or set TMPDIR to another folder"});
  seats_ = static_cast<Seat*>(mapped);
}

FaultPage::~FaultPage() { ::munmap(seats_, sizeof(Seat) * static_cast<std::size_t>(size_)); }

void FaultPage::tell(const std::string& text) noexcept {
  Seat& seat = seats_[rank_];
  std::uint32_t silent = kSilent;
  if (!seat.state.compare_exchange_strong(silent, kWriting)) return;
  seat.text[text.copy(seat.text, sizeof seat.text - 1)] = 0;
  seat.state = kTold;
}

std::optional<std::string> FaultPage::told() const {
  for (int rank = 0; rank < size_; ++rank)
    if (const Seat& seat = seats_[rank]; rank != rank_ && seat.state == kTold)
      return std::string(seat.text, ::strnlen(seat.text, sizeof seat.text));
  return std::nullopt;
}

}  // namespace quern::nccl
