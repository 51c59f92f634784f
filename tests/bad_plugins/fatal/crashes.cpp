// Fault: its factory reads what is not there.
#include "../sink.h"

QUERN_PLUGIN("log", "crashes", manifest) {
  manifest.add<quern::LogSink>("crashes", "never seen", {}, [](const quern::OptionValues& values) {
    const volatile int* nothing = nullptr;
    return *nothing == 0 ? nullptr : make_silent_sink(values);
  });
}
