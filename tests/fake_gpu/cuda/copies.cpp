// Copies, and the calls that wait until the device has finished.
//
// Copies to and from the device really copy data. Copies within the device do nothing, because
// kernels write nothing.
#include "fake.h"

#include <cstring>

namespace {

bool reads_zeros = false;

const char *direction(fake::Place to, fake::Place from) {
  using fake::Place;
  if (to == Place::device && from == Place::device) return "within the device";
  if (to == Place::device)
    return from == Place::page_locked ? "page-locked to device" : "pageable to device";
  if (from == Place::device)
    return to == Place::page_locked ? "device to page-locked" : "device to pageable";
  return "within the host";
}

cudaError_t copy(void *to, const void *from, size_t bytes, bool waits) {
  const fake::Place to_place = fake::place_of(to);
  const fake::Place from_place = fake::place_of(from);
  if (waits) fake::log_stack("wait", "cudaMemcpy");
  const bool pageable = to_place == fake::Place::pageable || from_place == fake::Place::pageable;
  if (pageable)
    fake::log_stack("copy", direction(to_place, from_place));
  else
    fake::log("copy", "%s\t%zu", direction(to_place, from_place), bytes);
  if (to_place == fake::Place::device && from_place == fake::Place::device) return cudaSuccess;
  if (from_place == fake::Place::device && reads_zeros)
    memset(to, 0, bytes);
  else
    memcpy(to, from, bytes);
  return cudaSuccess;
}

}  // namespace

// Make reads from the device return zeros instead of the data last copied to the address.
EXPORT void fake_gpu_read_zeros(bool zeros) { reads_zeros = zeros; }

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, true);
}

EXPORT cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, bytes, false);
}

EXPORT cudaError_t cudaMemset(void *, int, size_t bytes) {
  fake::log("memset", "%zu", bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *, int, size_t bytes, cudaStream_t) {
  fake::log("memset", "%zu", bytes);
  return cudaSuccess;
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr, unsigned, size_t words, CUstream) {
  fake::log("memset", "%zu", 4 * words);
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  fake::log_stack("wait", "cudaDeviceSynchronize");
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) {
  fake::log_stack("wait", "cudaStreamSynchronize");
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  fake::log_stack("wait", "cudaEventSynchronize", event);
  return cudaSuccess;
}

EXPORT CUresult cuCtxSynchronize() {
  fake::log_stack("wait", "cuCtxSynchronize");
  return CUDA_SUCCESS;
}
