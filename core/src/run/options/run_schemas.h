#pragma once
// What a run is made of: the sections of its config and the implementations that are built in. A component owns its
// options and its factory; here they are put together, and nowhere else.

#include <vector>

#include "config/document.h"
#include "config/schema.h"
#include "plugin/plugin_host.h"
#include "quern/run.h"

namespace quern {

/// Every section of a run's config, in the order of the reference page.
std::vector<SectionSchema> run_schemas();

/// A host with the standard folders, and the factories that are built in or in `components`.
PluginHost run_host(const Manifest& components = {});

/// The TOML with its overrides.
ConfigDocument document_of(const RunConfig& config);

}  // namespace quern
