#include "gemma3_text.h"

QUERN_PLUGIN("model", "gemma3_text", manifest) { quern::decoder::add_family(manifest, quern::gemma3_text::family()); }
