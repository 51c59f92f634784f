#pragma once
// Stored bytes that change by themselves, as memory without ECC and failing disks make them: the kit looks for what it
// stored in the memory and the open files of its process, and flips a bit there.

#include <string_view>

#include "conformance/subject.h"

namespace quern::conformance {

enum class FlippedBit {
  reported,     ///< error() says so after the next get
  hidden,       ///< the kit does not find the bytes: compressed, encrypted, of another process
  passed_over,  ///< the get gives other bytes, and error() nothing
};
std::string_view name_of(FlippedBit outcome);

/// Of the first, a middle and the last byte of a slot the worst: the last in the order above.
FlippedBit after_flipped_bit(const Subject& subject);

}  // namespace quern::conformance
