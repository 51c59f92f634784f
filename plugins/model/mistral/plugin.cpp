#include "mistral.h"

QUERN_PLUGIN("model", "mistral", manifest) { quern::decoder::add_family(manifest, quern::mistral::family()); }
