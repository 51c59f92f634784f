#include "runtime/telemetry.h"

#define BOOST_DLL_USE_STD_FS
#include <boost/dll/shared_library.hpp>

namespace quern::cuda {

namespace {

// The part of NVML's stable C interface that is used; its header comes with only some toolkits.
using Status = int;  // 0: success
using Unit = void*;
constexpr int kSmClock = 1, kMemoryClock = 2, kGpuTemperature = 0;

struct Limit {
  unsigned long long bit;
  const char* name;
};
constexpr Limit kLimits[] = {
    {0x04, "power limit"}, {0x08, "hardware slowdown"},    {0x10, "sync boost group"},
    {0x20, "temperature"}, {0x40, "temperature (halved)"}, {0x80, "power brake"},
};

}  // namespace

std::vector<std::string> clock_limits(unsigned long long reasons) {
  std::vector<std::string> limits;
  for (const Limit& limit : kLimits)
    if ((reasons & limit.bit) != 0) limits.emplace_back(limit.name);
  return limits;
}

struct GpuTelemetry::Library {
  boost::dll::shared_library file;
  Status (*initialise)() = nullptr;
  Status (*shut_down)() = nullptr;
  const char* (*describe)(Status) = nullptr;
  Status (*unit_at)(const char* bus_id, Unit*) = nullptr;
  Status (*clock)(Unit, int which, unsigned* megahertz) = nullptr;
  Status (*power)(Unit, unsigned* milliwatts) = nullptr;
  Status (*power_limit)(Unit, unsigned* milliwatts) = nullptr;
  Status (*temperature)(Unit, int which, unsigned* celsius) = nullptr;
  Status (*limits)(Unit, unsigned long long* reasons) = nullptr;
  Unit unit = nullptr;
  bool initialised = false;

  ~Library() {
    if (initialised) shut_down();
  }

  template <class Function>
  void find(const char* name, Function*& function) {
    function = file.get<Function>(name);  // throws for an unknown name
  }

  /// Empty, or why it cannot be used.
  std::string open(const std::string& bus_id) try {
    file.load("libnvidia-ml.so.1", boost::dll::load_mode::search_system_folders);
    find("nvmlInit_v2", initialise);
    find("nvmlShutdown", shut_down);
    find("nvmlErrorString", describe);
    find("nvmlDeviceGetHandleByPciBusId_v2", unit_at);
    find("nvmlDeviceGetClockInfo", clock);
    find("nvmlDeviceGetPowerUsage", power);
    find("nvmlDeviceGetEnforcedPowerLimit", power_limit);
    find("nvmlDeviceGetTemperature", temperature);
    find("nvmlDeviceGetCurrentClocksThrottleReasons", limits);  // its name in every driver, old and new
    Status status = initialise();
    initialised = status == 0;
    if (status == 0) status = unit_at(bus_id.c_str(), &unit);
    return status == 0 ? "" : std::string("NVML: ") + describe(status);
  } catch (const std::exception& error) {
    return std::string("NVML cannot be loaded: ") + error.what();
  }
};

GpuTelemetry::GpuTelemetry(const std::string& bus_id) : library_(std::make_unique<Library>()) {
  unavailable_ = library_->open(bus_id);
}

GpuTelemetry::~GpuTelemetry() = default;

Telemetry GpuTelemetry::read() const {
  Telemetry telemetry;
  telemetry.unavailable = unavailable_;
  if (!unavailable_.empty()) return telemetry;
  const Library& nvml = *library_;
  // A figure that this GPU does not give is left out.
  auto add = [&](const char* name, Status status, double value, const char* unit) {
    if (status == 0) telemetry.readings.push_back({name, value, unit});
  };
  unsigned value = 0;
  Status status = nvml.clock(nvml.unit, kSmClock, &value);
  add("sm_clock", status, value, "MHz");
  status = nvml.clock(nvml.unit, kMemoryClock, &value);
  add("memory_clock", status, value, "MHz");
  status = nvml.power(nvml.unit, &value);
  add("power", status, value / 1e3, "W");
  status = nvml.power_limit(nvml.unit, &value);
  add("power_limit", status, value / 1e3, "W");
  status = nvml.temperature(nvml.unit, kGpuTemperature, &value);
  add("temperature", status, value, "C");
  unsigned long long reasons = 0;
  if (nvml.limits(nvml.unit, &reasons) == 0) telemetry.slowed_by = clock_limits(reasons);
  return telemetry;
}

}  // namespace quern::cuda
