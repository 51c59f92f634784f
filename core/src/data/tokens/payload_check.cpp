#include "data/tokens/payload_check.h"

#include <sys/resource.h>
#include <unistd.h>

#include <system_error>
#include <utility>

#include "base/files/durable_file.h"

namespace quern {

PayloadCheck::PayloadCheck(std::vector<const TokenFile*> files) : files_(std::move(files)) {
  constexpr std::uint64_t kAtOnce = std::uint64_t{16} << 20;
  std::erase_if(files_, [](const TokenFile* file) { return !file->states_checksum(); });
  std::uint64_t bytes = 0;
  for (const TokenFile* file : files_) bytes += file->payload_bytes();
  if (bytes <= kAtOnce) {
    for (const TokenFile* file : files_) file->verify();
    return;
  }
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    fail_resources(files_.front()->path(), "no thread can be started to verify it", error.code().value());
  }
}

PayloadCheck::~PayloadCheck() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

void PayloadCheck::run() {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), 19);  // of this thread alone; training comes first
  try {
    for (const TokenFile* file : files_)
      if (!stopping_) file->verify(stopping_);
  } catch (...) {
    std::lock_guard lock(mutex_);
    fault_ = std::current_exception();
  }
}

void PayloadCheck::rethrow() const {
  std::lock_guard lock(mutex_);
  if (fault_) std::rethrow_exception(fault_);
}

}  // namespace quern
