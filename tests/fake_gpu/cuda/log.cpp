// The log has one line per call, with fields separated by tabs. Python opens and reads the file
// (`log.py`).
#include "fake.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <unistd.h>

namespace {

int log_file = -1;
int stack_signal = 0;

}  // namespace

namespace fake {

std::recursive_mutex &mutex() {
  static auto *one = new std::recursive_mutex;  // never destroyed: threads may outlive `main`
  return *one;
}

bool is_logging() { return log_file >= 0; }

void log(const char *kind, const char *format, ...) {
  if (!is_logging()) return;
  char line[4096];
  int length = snprintf(line, sizeof line, "%s\t", kind);
  va_list values;
  va_start(values, format);
  length += vsnprintf(line + length, sizeof line - length - 1, format, values);
  va_end(values);
  if (length > (int)sizeof line - 2) length = sizeof line - 2;
  line[length++] = '\n';
  std::lock_guard lock(mutex());
  if (write(log_file, line, length) < 0) log_file = -1;
}

void log_stack(const char *kind, const char *what, const void *object) {
  if (!is_logging()) return;
  std::lock_guard lock(mutex());
  log(kind, "%s\t%p", what, object);
  // Python's faulthandler writes the stack of this thread to the same file before `raise` returns.
  // faulthandler needs no interpreter lock, which another thread may hold while it waits for torch.
  if (stack_signal) raise(stack_signal);
}

void *new_handle() {
  std::lock_guard lock(mutex());
  static uintptr_t last = 0x1000;
  return (void *)(last += 16);
}

}  // namespace fake

// Write the log to the open file `file`, or nowhere if `file` is -1. `signal_number` is the signal
// that makes faulthandler write a stack, or 0 for no stacks.
EXPORT void fake_gpu_log(int file, int signal_number) {
  std::lock_guard lock(fake::mutex());
  log_file = file;
  stack_signal = signal_number;
}

// Called by the functions that exist only because torch's libraries ask for their names.
EXPORT void fake_gpu_missing(const char *name) {
  fprintf(stderr, "fake GPU: %s is not implemented (tests/fake_gpu/cuda)\n", name);
  fake::log_stack("missing", name);
}
