#include "conformance/harness/plugin_heap.h"

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

namespace quern::conformance {

namespace {

constexpr std::size_t kPage = 4096, kAlignment = 16, kRegion = std::size_t{1} << 36;
constexpr std::int64_t kMostBlocks = 20'000;  // each takes two of the 65,530 mappings that a process may have
constexpr unsigned char kFresh = 0xFB;        // as fp32, -2.6e36
constexpr std::uint64_t kMagic = 0x71756572'6e68656au;
constexpr std::size_t kMostPages = 65;  ///< of a block that is guarded, 256 KiB and its header

/// In front of a block's data.
struct alignas(kAlignment) Header {
  std::uint64_t magic;
  std::size_t bytes, pages;
  unsigned char* begin;  ///< of its first page
};

/// Pages that were given back, in a list by their number; the next one's address is at their begin.
std::mutex pool_lock;
unsigned char* pool[kMostPages + 1] = {};

struct Range {
  std::uintptr_t begin, end;
};

constexpr std::size_t kMostRanges = 8;
Range code[kMostRanges];  // of the library; before `guarding` is set
std::atomic<bool> guarding = false;
unsigned char* region = nullptr;
std::size_t taken = 0;               // bytes of the region; under pool_lock
std::int64_t blocks = 0;             // that were ever made; under pool_lock
std::atomic<std::size_t> alive = 0;  // bytes of live blocks
std::atomic<std::size_t> guarded_count = 0, too_large_count = 0, without_room_count = 0;  // as in TakenBlocks

std::size_t rounded(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

bool is_guarded(const void* memory) {
  const auto* at = static_cast<const unsigned char*>(memory);
  return region && at >= region && at < region + kRegion;
}

bool from_library(const void* caller) {
  const auto at = reinterpret_cast<std::uintptr_t>(caller);
  for (const Range& range : code)
    if (at >= range.begin && at < range.end) return true;
  return false;
}

[[noreturn]] void give_up(const char* text) {
  [[maybe_unused]] const auto ignored = ::write(STDERR_FILENO, text, std::strlen(text));
  std::abort();
}

/// Pages that may be touched, before one that may not; null: no room.
unsigned char* take_pages(std::size_t pages) {
  const std::lock_guard lock(pool_lock);
  if (unsigned char* begin = pool[pages]) {
    std::memcpy(&pool[pages], begin, sizeof begin);
    return begin;
  }
  const std::size_t bytes = pages * kPage;
  if (blocks == kMostBlocks || taken + bytes + kPage > kRegion) return nullptr;
  unsigned char* begin = region + taken;
  if (::mprotect(begin, bytes, PROT_READ | PROT_WRITE) != 0) return nullptr;
  taken += bytes + kPage, ++blocks;
  return begin;
}

void give_pages_back(unsigned char* begin, std::size_t pages) {
  const std::lock_guard lock(pool_lock);
  std::memcpy(begin, &pool[pages], sizeof begin);
  pool[pages] = begin;
}

/// Null: no room, or too large.
void* guarded(std::size_t bytes) {
  if (bytes > kMostPages * kPage - sizeof(Header)) return ++too_large_count, nullptr;
  const std::size_t data = rounded(bytes, kAlignment), pages = rounded(data + sizeof(Header), kPage) / kPage;
  unsigned char* begin = take_pages(pages);
  if (!begin) return ++without_room_count, nullptr;
  ++guarded_count;
  unsigned char* memory = begin + pages * kPage - data;
  std::memset(memory, kFresh, data);
  new (memory - sizeof(Header)) Header{kMagic, bytes, pages, begin};
  alive += bytes;
  return memory;
}

void give_back(void* memory) {
  auto* bytes = static_cast<unsigned char*>(memory);
  const Header header = *reinterpret_cast<const Header*>(bytes - sizeof(Header));
  if (header.magic != kMagic)
    give_up("quern: the plugin wrote before a block that it took by new, or gave one back twice\n");
  const std::size_t data = rounded(header.bytes, kAlignment);
  for (std::size_t i = header.bytes; i < data; ++i)
    if (bytes[i] != kFresh) give_up("quern: the plugin wrote behind a block that it took by new\n");
  std::memset(bytes - sizeof(Header), kFresh, sizeof(Header) + data);
  alive -= header.bytes;
  give_pages_back(header.begin, header.pages);
}

void* allocate(std::size_t bytes, const void* caller) {
  if (guarding.load(std::memory_order_acquire) && from_library(caller))
    if (void* memory = guarded(bytes)) return memory;
  while (true) {
    if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
    const std::new_handler handler = std::get_new_handler();
    if (!handler) throw std::bad_alloc();
    handler();
  }
}

void release(void* memory) noexcept { is_guarded(memory) ? give_back(memory) : std::free(memory); }

}  // namespace

std::string guard_heap_of(const std::filesystem::path& library) {
  guarding = false;
  guarded_count = too_large_count = without_room_count = 0;
  for (Range& range : code) range = {};
  struct Search {
    const std::filesystem::path& library;
    std::size_t found = 0;
  } search{library};
  ::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* to) {
        auto& search = *static_cast<Search*>(to);
        std::error_code ignored;
        if (!std::filesystem::equivalent(info->dlpi_name, search.library, ignored) || ignored) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& part = info->dlpi_phdr[i];
          if (part.p_type != PT_LOAD || !(part.p_flags & PF_X) || search.found == kMostRanges) continue;
          const std::uintptr_t begin = info->dlpi_addr + part.p_vaddr;
          code[search.found++] = {begin, begin + part.p_memsz};
        }
        return 1;
      },
      &search);
  if (search.found == 0) return "its code is not found among the libraries that are loaded";
  if (!region) {
    void* memory = ::mmap(nullptr, kRegion, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
      return std::to_string(kRegion >> 30) + " GiB of address space are not to be had: " + std::strerror(errno);
    region = static_cast<unsigned char*>(memory);
  }
  guarding.store(true, std::memory_order_release);
  return {};
}

TakenBlocks taken_blocks() { return {guarded_count, too_large_count, without_room_count}; }

std::size_t guarded_bytes() { return alive; }

const char* guarded_block_at(const void* address) {
  return is_guarded(address) ? "beyond a block that it took by new" : nullptr;
}

}  // namespace quern::conformance

// What every `new` and `delete` of the process comes to; without guarded blocks as in the standard library.

using quern::conformance::allocate;
using quern::conformance::release;

// NOLINTBEGIN(misc-new-delete-overloads)
void* operator new(std::size_t bytes) { return allocate(bytes, __builtin_return_address(0)); }
void* operator new[](std::size_t bytes) { return allocate(bytes, __builtin_return_address(0)); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
// NOLINTEND(misc-new-delete-overloads)
