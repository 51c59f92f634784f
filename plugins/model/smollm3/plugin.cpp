#include "smollm3.h"

QUERN_PLUGIN("model", "smollm3", manifest) { quern::decoder::add_family(manifest, quern::smollm3::family()); }
