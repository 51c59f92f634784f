#include "log/jsonl_sink.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/files/descriptor.h"
#include "base/format.h"
#include "quern/error.h"

namespace quern {

namespace {

namespace fs = std::filesystem;

constexpr FileKind kLog{"a log of quern", "{\"event\":\""};

// Bytes up to and with the last line end; -1 with errno set when the file cannot be read.
off_t finished_bytes(int file, off_t size) {
  constexpr off_t kChunk = 4096;
  std::string chunk;
  for (off_t end = size; end > 0;) {
    const off_t begin = std::max<off_t>(end - kChunk, 0);
    chunk.resize(static_cast<std::size_t>(end - begin));
    if (::pread(file, chunk.data(), chunk.size(), begin) != end - begin) return -1;
    if (auto at = chunk.rfind('\n'); at != std::string::npos) return begin + static_cast<off_t>(at) + 1;
    end = begin;
  }
  return 0;
}

}  // namespace

std::string to_json_line(const LogEvent& event) {
  nlohmann::ordered_json line = {{"event", event.kind}};
  for (const auto& [key, value] : event.fields) {
    const auto* real = std::get_if<double>(&value);
    if (real && !std::isfinite(*real)) {
      line[key] = nullptr;
      line[key + "_text"] = format_fixed(*real, 0);
    } else {
      std::visit([&line, &name = key](const auto& typed) { line[name] = typed; }, value);
    }
  }
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

JsonlSink::~JsonlSink() {
  if (file_ >= 0) ::close(file_);
}

std::string JsonlSink::next_step() const {
  if (!chosen_) return "choose another log.directory, or free space there";
  std::error_code error;
  return "choose another log.jsonl.path" +
         (fs::path(path_).is_absolute() ? "" : "; it starts at " + fs::current_path(error).string());
}

void JsonlSink::fail(const std::string& what, int error_number) const {
  throw Error(ErrorCode::resources,
              {.where = path_, .what = what, .found = std::strerror(error_number), .next = next_step()});
}

void JsonlSink::open_file(bool goes_on) {
  if (file_ >= 0) ::close(std::exchange(file_, -1));
  // Read too, to look at what is there; a pipe without a reader does not hold this up, and is refused.
  const int file = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0644);
  if (file < 0) fail("the log cannot be opened", errno);
  try {
    check_own_file(file, path_, kLog, next_step());
    if (lock_alone(file) == EWOULDBLOCK)  // a file system may have no locks
      throw Error(ErrorCode::resources, {.where = path_, .what = "another run writes this log", .next = next_step()});
    const off_t size = ::lseek(file, 0, SEEK_END), keep = goes_on ? finished_bytes(file, size) : 0;
    if (size < 0 || keep < 0) fail("the log cannot be read", errno);
    if (keep < size && ::ftruncate(file, keep) != 0) fail("the log cannot be cut", errno);
  } catch (...) {
    ::close(file);
    throw;
  }
  file_ = file;
}

void JsonlSink::open(const RunPlace& place) {
  if (!chosen_) path_ = (fs::path(place.directory) / "log.jsonl").string();
  open_file(place.resumed);
}

void JsonlSink::write(const LogEvent& event) {
  struct stat status {};
  if (file_ < 0 || (::fstat(file_, &status) == 0 && status.st_nlink == 0)) open_file(true);
  const std::string line = to_json_line(event) + "\n";
  const off_t end = ::lseek(file_, 0, SEEK_END);
  if (write_all(file_, line)) return;
  const int reason = errno;
  if (end >= 0 && ::ftruncate(file_, end) != 0) ::close(std::exchange(file_, -1));
  fail("the log cannot be written", reason);
}

}  // namespace quern
