#include "log/event_log.h"

#include <exception>
#include <utility>

#include "quern/error.h"

namespace quern {

namespace {

std::string name_of(const std::string& id) { return "log sink \"" + id + "\""; }

// What `action` throws, as a text; empty: nothing.
template <class Action>
std::string failure_of(Action action) {
  try {
    action();
    return "";
  } catch (const std::exception& error) {
    return *error.what() ? error.what() : "an exception without a text";
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace

void EventLog::add(const std::string& id, std::unique_ptr<LogSink> sink, const RunPlace& place) {
  try {
    sink->open(place);
  } catch (const Error& error) {
    ErrorDetail detail = error.detail();
    detail.where = name_of(id) + (detail.where.empty() ? "" : ": " + detail.where);
    throw Error(error.code(), std::move(detail));
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    fail_internal(name_of(id), error.what());
  } catch (...) {
    fail_internal(name_of(id), "an exception of unknown type");
  }
  sinks_.push_back({id, std::move(sink)});
}

bool EventLog::deliver(const LogEvent& event) {
  bool taken = false;
  for (Sink& sink : sinks_) {
    std::string reason = failure_of([&] { sink.sink->write(event); });
    taken = taken || reason.empty();
    if (!reason.empty() && sink.missing++ == 0) sink.reason = std::move(reason);
  }
  return taken;
}

void EventLog::warn_of_sink(const std::string& text) {
  if (!deliver({"warning", {{"text", text}}})) untold_.push_back(text);
}

void EventLog::write(const LogEvent& event) {
  deliver(event);
  for (Sink& sink : sinks_)
    if (sink.missing > 0 && !std::exchange(sink.told, true))
      warn_of_sink(name_of(sink.id) + " fails, and the run continues without it: " + sink.reason);
}

std::vector<std::string> EventLog::end() {
  for (const Sink& sink : sinks_)
    if (sink.missing > 0)
      warn_of_sink(name_of(sink.id) + ": " + std::to_string(sink.missing) + " events are missing: " + sink.reason);
  return std::exchange(untold_, {});
}

}  // namespace quern
