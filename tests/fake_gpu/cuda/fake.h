// The declarations that the files in this folder share. The files replace the functions of the CUDA
// runtime, the driver, cuBLAS and NVML that torch calls. `build.py` compiles all files as one file.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <mutex>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

enum class Place { pageable, page_locked, device };  // `pageable`: all memory that we did not allocate

std::recursive_mutex &mutex();

// log.cpp
bool is_logging();
void log(const char *kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Write a line and the calling thread's Python stack.
void log_stack(const char *kind, const char *what, const void *object = nullptr);

// devices.cpp
size_t total_bytes();
int current_device();
int device_attribute(int number);

// memory.cpp
Place place_of(const void *address);
bool charge(size_t bytes);  // false if the device's memory does not suffice
void release(size_t bytes);

// launches.cpp
void name_kernel(const void *function, const char *name);
void launch(const void *function, dim3 grid, dim3 block, size_t shared_bytes, const void *stream);

// Return a unique value. Streams, graphs and modules consist only of such a value.
void *new_handle();

}  // namespace fake
