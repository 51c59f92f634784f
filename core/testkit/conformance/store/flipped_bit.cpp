#include "conformance/store/flipped_bit.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/files/test_directory.h"
#include "conformance/report.h"
#include "quern/testkit/device_memory.h"

namespace quern::conformance {

namespace {

constexpr std::size_t kBytes = 9001, kMark = 64;

/// Stored bytes to look for, and which of them changes.
struct Mark {
  unsigned char bytes[kMark];
  std::size_t changed;
};

/// Flips a bit of each copy of `mark` among the bytes; how many there are.
int flip_in(unsigned char* begin, std::size_t bytes, const Mark& mark) {
  int found = 0;
  for (unsigned char *at = begin, *end = begin + bytes;
       (at = static_cast<unsigned char*>(::memmem(at, static_cast<std::size_t>(end - at), mark.bytes, kMark))) !=
       nullptr;
       at += kMark)
    if (at != mark.bytes) at[mark.changed] ^= 4, ++found;
  return found;
}

/// In the heap and other private memory that can be written.
int flip_in_memory(const Mark& mark) {
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::string rights;
    std::istringstream(line) >> std::hex >> begin >> dash >> end >> rights;
    if (rights.starts_with("rw") && line.find("[stack]") == line.npos && line.find("/dev/") == line.npos)
      ranges.emplace_back(begin, end);
  }
  int found = 0;
  for (const auto& [begin, end] : ranges) found += flip_in(reinterpret_cast<unsigned char*>(begin), end - begin, mark);
  return found;
}

/// In files that this process has open, and in the store's folder.
int flip_in_files(const std::string& folder, const Mark& mark) {
  int found = 0;
  std::vector<std::string> paths;
  for (const char* list : {"/proc/self/fd", folder.c_str()})
    for (const auto& entry : std::filesystem::recursive_directory_iterator(list)) paths.push_back(entry.path());
  for (const std::string& path : paths) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_size > 64 << 20) continue;
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) continue;
    std::vector<unsigned char> bytes(static_cast<std::size_t>(status.st_size));
    const auto size = static_cast<ssize_t>(bytes.size());
    if (::pread(file, bytes.data(), bytes.size(), 0) == size && flip_in(bytes.data(), bytes.size(), mark) > 0 &&
        ::pwrite(file, bytes.data(), bytes.size(), 0) == size)
      ++found;
    ::fsync(file);
    ::close(file);
  }
  return found;
}

/// A bit of byte `place` flips.
FlippedBit after_bit_at(const Subject& subject, std::size_t place) {
  const TestDirectory folder;
  auto device = open_device(subject.host, subject.options);
  auto store = subject.make<OffloadStore>();
  store->open(*device, {.folder = folder.path()});
  const Stream stream = device->stream(StreamKind::copy_out);
  const OffloadSlot slot = store->reserve(kBytes);
  testkit::DeviceMemory memory(*device, kBytes);
  const std::size_t first = std::min(place - std::min(place, kMark / 2), kBytes - kMark);
  Mark mark{{}, place - first};
  {
    std::vector<unsigned char> stored(kBytes);
    std::uint32_t word = 0x9e3779b9;
    for (unsigned char& byte : stored) byte = static_cast<unsigned char>((word = word * 1664525 + 1013904223) >> 24);
    std::memcpy(mark.bytes, stored.data() + first, kMark);
    memory.write(stored.data());
    store->put(slot, 0, memory.data(), kBytes, stream);
    store->flush();
    device->synchronize(stream);
    device->fill(memory.data(), 0, kBytes, stream);
    device->synchronize(stream);
    std::fill(stored.begin(), stored.end(), static_cast<unsigned char>(0));
  }
  if (flip_in_memory(mark) + flip_in_files(folder.path(), mark) == 0) return FlippedBit::hidden;
  store->get(slot, 0, memory.data(), kBytes, stream);
  device->synchronize(stream);
  const bool told = store->error().has_value();
  std::vector<unsigned char> got(kBytes);
  memory.read(got.data());
  if (told) return FlippedBit::reported;
  return std::memcmp(got.data() + first, mark.bytes, kMark) == 0 ? FlippedBit::hidden : FlippedBit::passed_over;
}

}  // namespace

std::string_view name_of(FlippedBit outcome) {
  constexpr std::string_view names[] = {"error() reports it", "the kit does not find it", "nothing reports it"};
  return names[static_cast<std::size_t>(outcome)];
}

FlippedBit after_flipped_bit(const Subject& subject) {
  FlippedBit worst = FlippedBit::reported;
  for (const std::size_t place : {std::size_t{0}, std::size_t{5032}, kBytes - 1})
    worst = std::max(worst, after_bit_at(subject, place));
  return worst;
}

}  // namespace quern::conformance
