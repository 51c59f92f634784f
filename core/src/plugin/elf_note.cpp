// ELF as in "System V Application Binary Interface", chapters 4 and 5, for the class and byte order of this library.
#include "plugin/elf_note.h"

#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <vector>

/// The header of libquern itself, from the linker: what a library for this machine has in common with it.
extern "C" __attribute__((visibility("hidden"))) const ElfW(Ehdr) __ehdr_start;

namespace quern {

namespace {

using Header = ElfW(Ehdr);
using Segment = ElfW(Phdr);
using Section = ElfW(Shdr);

std::string found(const std::string& found, const std::string& expected) {
  return "found " + found + ", expected " + expected;
}

class Library {
 public:
  explicit Library(const std::filesystem::path& path) : file_(path, std::ios::binary | std::ios::ate) {
    if (file_) size_ = static_cast<std::uint64_t>(file_.tellg());
  }

  ElfNote note(std::string_view owner) {
    ElfNote note;
    note.fault = check_header();
    if (note.fault.empty()) note.fault = check_segments();
    if (note.fault.empty()) note.fault = check_sections();
    if (note.fault.empty() && !find(owner, note.text))
      note.fault = found("no note of " + std::string(owner), "a library made with QUERN_PLUGIN");
    return note;
  }

 private:
  bool has(std::uint64_t offset, std::uint64_t bytes) const { return offset <= size_ && bytes <= size_ - offset; }

  bool read(std::uint64_t offset, void* to, std::size_t bytes) {
    if (!has(offset, bytes)) return false;
    file_.clear();
    file_.seekg(static_cast<std::streamoff>(offset));
    return bytes == 0 || file_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes)).good();
  }

  std::string shortened(const char* what) const {
    return found("a damaged file: of " + std::to_string(size_) + " bytes, without all of its " + what,
                 "as many bytes as its header describes; copy or build it again");
  }

  std::string check_header() {
    if (!read(0, &header_, sizeof header_) || std::memcmp(header_.e_ident, ELFMAG, SELFMAG) != 0)
      return found("no ELF header", "a shared library");
    const Header& own = __ehdr_start;
    if (!std::equal(header_.e_ident + EI_CLASS, header_.e_ident + EI_VERSION + 1, own.e_ident + EI_CLASS) ||
        header_.e_machine != own.e_machine)
      return found("a library for machine " + std::to_string(header_.e_machine) + ", class " +
                       std::to_string(header_.e_ident[EI_CLASS]) + ", byte order " +
                       std::to_string(header_.e_ident[EI_DATA]),
                   std::to_string(own.e_machine) + ", " + std::to_string(own.e_ident[EI_CLASS]) + " and " +
                       std::to_string(own.e_ident[EI_DATA]) + " as of quern");
    if (header_.e_type != ET_DYN)
      return found("an ELF file of type " + std::to_string(header_.e_type),
                   "a shared library, type " + std::to_string(ET_DYN));
    return {};
  }

  std::string check_segments() {
    segments_.resize(header_.e_phnum);
    if (header_.e_phentsize != sizeof(Segment) ||
        !read(header_.e_phoff, segments_.data(), segments_.size() * sizeof(Segment)))
      return shortened("program headers");
    for (const Segment& segment : segments_)
      if (!has(segment.p_offset, segment.p_filesz) || (segment.p_type == PT_LOAD && segment.p_filesz > segment.p_memsz))
        return shortened("segments");
    auto is = [](std::uint32_t type) { return [type](const Segment& segment) { return segment.p_type == type; }; };
    for (std::uint32_t type : {PT_LOAD, PT_DYNAMIC})
      if (std::none_of(segments_.begin(), segments_.end(), is(type))) return shortened("segments");
    return {};
  }

  /// The loader needs no sections. But their table comes last in a file, so it shows an end that is cut off or zeros.
  std::string check_sections() {
    if (header_.e_shnum == 0) return {};
    std::vector<Section> sections(header_.e_shnum);
    if (header_.e_shentsize != sizeof(Section) || header_.e_shstrndx >= sections.size() ||
        !read(header_.e_shoff, sections.data(), sections.size() * sizeof(Section)))
      return shortened("section table");
    for (const Section& section : sections)
      if (section.sh_type != SHT_NULL && section.sh_type != SHT_NOBITS && !has(section.sh_offset, section.sh_size))
        return shortened("sections");
    return sections[header_.e_shstrndx].sh_type == SHT_STRTAB ? "" : shortened("section names");
  }

  bool find(std::string_view owner, std::string& text) {
    constexpr std::uint64_t kMost = 1 << 20;  // of a segment of notes; a real one has a few hundred bytes
    for (const Segment& segment : segments_) {
      if (segment.p_type != PT_NOTE || segment.p_filesz > kMost) continue;
      std::string notes(segment.p_filesz, '\0');
      if (read(segment.p_offset, notes.data(), notes.size()) && find_in(notes, segment.p_align, owner, text))
        return true;
    }
    return false;
  }

  static bool find_in(std::string_view notes, std::uint64_t alignment, std::string_view owner, std::string& text) {
    const std::uint64_t step = alignment == 8 ? 8 : 4;
    auto rounded = [step](std::uint64_t size) { return (size + step - 1) / step * step; };
    ElfW(Nhdr) head;
    while (notes.size() >= sizeof head) {
      std::memcpy(&head, notes.data(), sizeof head);
      const std::uint64_t begin = rounded(sizeof head + std::uint64_t{head.n_namesz}), end = begin + head.n_descsz;
      if (end > notes.size()) return false;
      if (notes.substr(sizeof head, head.n_namesz) == std::string(owner) + '\0') {
        text = notes.substr(begin, head.n_descsz);
        return true;
      }
      notes.remove_prefix(std::min<std::uint64_t>(rounded(end), notes.size()));
    }
    return false;
  }

  std::ifstream file_;
  std::uint64_t size_ = 0;
  Header header_{};
  std::vector<Segment> segments_;
};

}  // namespace

ElfNote read_elf_note(const std::filesystem::path& file, std::string_view owner) { return Library(file).note(owner); }

}  // namespace quern
