#include "log/jsonl_sink.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>

#include <nlohmann/json.hpp>

#include "log/format.h"
#include "quern/error.h"

namespace quern {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& path, const std::string& what, const std::string& reason) {
  throw Error(
      ErrorCode::resources,
      {.where = path, .what = what, .found = reason, .next = "choose another log.directory, or free space there"});
}

// Bytes up to and with the last line end.
std::uintmax_t finished_bytes(const fs::path& path, std::uintmax_t size) {
  constexpr std::uintmax_t kChunk = 4096;
  std::ifstream stream(path, std::ios::binary);
  std::string chunk;
  for (std::uintmax_t end = size; end > 0;) {
    std::uintmax_t begin = end > kChunk ? end - kChunk : 0;
    chunk.resize(end - begin);
    stream.seekg(static_cast<std::streamoff>(begin));
    if (!stream.read(chunk.data(), static_cast<std::streamsize>(chunk.size())))
      fail(path.string(), "the log cannot be read", std::strerror(errno));
    if (auto at = chunk.rfind('\n'); at != std::string::npos) return begin + at + 1;
    end = begin;
  }
  return 0;
}

void cut_unfinished_line(const fs::path& path) {
  std::error_code error;
  std::uintmax_t size = fs::file_size(path, error);
  if (error) return;  // nothing there yet
  if (std::uintmax_t keep = finished_bytes(path, size); keep < size) fs::resize_file(path, keep, error);
  if (error) fail(path.string(), "the log's unfinished last line cannot be removed", error.message());
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

void JsonlSink::open(const RunPlace& place) {
  if (path_.empty()) path_ = (fs::path(place.directory) / "log.jsonl").string();
  if (place.resumed) cut_unfinished_line(path_);
  file_.reset(std::fopen(path_.c_str(), place.resumed ? "ab" : "wb"));
  if (!file_) fail(path_, "the log cannot be opened", std::strerror(errno));
}

void JsonlSink::write(const LogEvent& event) {
  std::string line = to_json_line(event) + "\n";
  bool written = std::fwrite(line.data(), 1, line.size(), file_.get()) == line.size();
  if (!written || std::fflush(file_.get()) != 0) fail(path_, "the log cannot be written", std::strerror(errno));
}

}  // namespace quern
