#pragma once
// The contracts of each kind, a file each; docs/conformance.md lists them.

#include <map>
#include <string>

#include "conformance/report.h"
#include "conformance/subject.h"

namespace quern::conformance {

/// Of every plugin: what it says of itself, its options, and that it can be made.
void check_description(Report& report, const Subject& subject);

void check_precision(Report& report, const Subject& subject);
void check_device(Report& report, const Subject& subject);
void check_model(Report& report, const Subject& subject);
void check_dataset(Report& report, const Subject& subject);
void check_log_sink(Report& report, const Subject& subject);
void check_communicator(Report& report, const Subject& subject);
void check_offload_store(Report& report, const Subject& subject);
void check_optimizer(Report& report, const Subject& subject);
void check_schedule(Report& report, const Subject& subject);

/// Files of a log sink, by name, that was given one event of each kind and then destroyed.
std::map<std::string, std::string> written_log(const Subject& subject);

}  // namespace quern::conformance
