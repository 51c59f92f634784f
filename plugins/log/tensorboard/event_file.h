#pragma once
// TensorBoard's event files, as much as scalars need: records framed as in TensorFlow's TFRecord
// (tensorflow/core/lib/io/record_writer.h), each an `Event` message (tensorflow/core/util/event.proto) spelled by hand.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace quern::tensorboard {

/// CRC-32C (Castagnoli), as in RFC 3720.
std::uint32_t crc32c(std::string_view bytes);

/// Length, its masked checksum, the bytes, their masked checksum.
std::string record(std::string_view bytes);

/// First of a file: `Event{wall_time, file_version: "brain.Event:2"}`.
std::string version_event(double wall_time);
/// `Event{wall_time, step, session_log: START}`: TensorBoard then drops its records from `step` on.
std::string start_event(double wall_time, std::int64_t step);
/// `Event{wall_time, step, summary}` with a simple value for each tag.
std::string scalars_event(double wall_time, std::int64_t step,
                          const std::vector<std::pair<std::string, float>>& scalars);

}  // namespace quern::tensorboard
