#include "phi3.h"

QUERN_PLUGIN("model", "phi3", manifest) { quern::decoder::add_family(manifest, quern::phi3::family()); }
